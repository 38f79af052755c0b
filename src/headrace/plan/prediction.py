"""The whole answer for one model, device and workload: what fits, and how fast it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models.streamed_layers import StreamedLayers
from headrace.plan.constants import CPU, H200, Constants, ErrorBand, error_band
from headrace.plan.gpus import Gpu, find_gpu
from headrace.plan.layout import Layout, layouts, reason
from headrace.plan.memory import Fit, Memory, fit, gib, keeps_experts
from headrace.plan.precision import Precision, read_precision
from headrace.plan.roofline import Machine, StepSeconds, step_seconds
from headrace.plan.settings import PlanSettings, limits_of
from headrace.plan.shape import ModelShape
from headrace.plan.simulate import StepLimits, Steps, simulate
from headrace.plan.source import find_shape
from headrace.plan.workload import Workload, of_lengths

PHASES = ("gemm", "attention", "cache", "other", "network", "bus", "host")


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds and rates of a workload. Latencies are means over requests; `phases` adds up to `seconds`."""

    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prefill_tokens_per_s: float  # while only prompts are computed
    decode_tokens_per_s: float  # while only answers are
    ttft_one_s: float  # time to first token of one mean prompt on an idle engine
    ttft_s: float  # mean over the workload, queueing included
    tpot_s: float  # mean time per output token after the first, at the workload's concurrency
    max_running: int  # most sequences at once
    num_steps: int
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    model: ModelShape
    gpu: Gpu
    workload: Workload
    precision: Precision
    layout: Layout
    layout_reason: str
    memory: Memory
    settings: Settings | None  # what the engine would resolve; None: it does not fit
    speed: Speed | None  # None: it does not fit
    error: ErrorBand
    problem: str | None  # why it does not run, with numbers
    notes: tuple[str, ...]  # what the reader must know about the prediction

    @property
    def fits(self) -> bool:
        return self.speed is not None

    @property
    def num_gpus(self) -> int:
        return self.layout.num_gpus

    def cost_per_million(self, tokens_per_s: float) -> float | None:
        """US dollars for a million tokens at this rate, at the GPU's price."""
        price = self.gpu.price
        return None if price is None or not tokens_per_s else price * self.num_gpus / 3600 / tokens_per_s * 1e6


def predict(
    model: ModelShape | str, gpu: Gpu | str, workload: Workload, settings: PlanSettings | None = None
) -> Prediction:
    """Predict memory and speed. Pure: reads no clock, no device and no network, and imports no torch."""
    shape = find_shape(model) if isinstance(model, str) else model
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    wanted = settings or PlanSettings()
    precision = _precision(shape, device, wanted)
    if wanted.max_model_len is not None and wanted.max_model_len > shape.max_model_len:
        raise ConfigError(
            f"max_model_len={wanted.max_model_len:,} is more than the model's own context of {shape.max_model_len:,} "
            "tokens; lower it, or leave it out"
        )
    options = _options(shape, device, precision, wanted)
    fitting = [(layout, found) for layout, found in options if _problem(found, workload, wanted) is None]
    # Without a layout that fits, show the one with the most memory.
    candidates = fitting or [max(options, key=lambda option: option[0].tensor * option[0].pipeline)]
    best: Prediction | None = None
    cache: dict[tuple[int, StepLimits], Steps] = {}
    for layout, found in candidates:
        made = _predict(shape, device, workload, precision, wanted, layout, found, cache)
        if best is None or _seconds(made) < _seconds(best):
            best = made
    assert best is not None
    is_forced = wanted.tensor_parallel_size is not None or wanted.pipeline_parallel_size is not None
    why = reason(best.layout, shape, device, min_gpus=_min_gpus(fitting), is_forced=is_forced) if fitting else ""
    return replace(best, layout_reason=why)


def smallest_layout(shape: ModelShape, gpu: Gpu, workload: Workload, settings: PlanSettings) -> Layout | None:
    """The layout with the fewest GPUs per replica that holds the model and the workload; cheap: no steps are run."""
    precision = _precision(shape, gpu, settings)
    options = _options(shape, gpu, precision, settings)
    return next((layout for layout, found in options if _problem(found, workload, settings) is None), None)


def _precision(shape: ModelShape, gpu: Gpu, settings: PlanSettings) -> Precision:
    """The precision asked for, or that of the checkpoint."""
    stored = None if gpu.is_cpu and shape.stored_format == "fp8" else shape.stored_format
    precision = read_precision(settings.quantization or stored, settings.kv_cache_dtype, gpu)
    if not gpu.is_cpu or precision.is_quantized or shape.spec is None:
        return precision
    return replace(precision, packed=shape.spec.packed_bits)


def constants_of(gpu: Gpu) -> Constants:
    return CPU if gpu.is_cpu else H200


def speed_of(
    shape: ModelShape,
    precision: Precision,
    machine: Machine,
    workload: Workload,
    limits: StepLimits,
    *,
    steps: Steps | None = None,
) -> Speed:
    """Simulate the workload's steps, and add up what each of them takes."""
    steps = simulate(workload, limits) if steps is None else steps
    seconds = step_seconds(steps, shape, precision, machine)
    of_requests = len(workload.requests) * machine.constants.request_seconds
    total = seconds.total
    whole = float(total.sum()) + of_requests
    until = np.cumsum(total)
    began = np.concatenate(([0.0], until))[steps.arrival]
    ttft = until[steps.first_token] - began
    outputs = workload.columns()[1]
    later = np.maximum(outputs - 1, 1)
    tpot = (until[steps.end] - until[steps.first_token]) / later
    num_in, num_out = workload.num_prompt_tokens, workload.num_output_tokens
    phases = {name: float(getattr(seconds, name).sum()) for name in PHASES}
    phases["host"] += of_requests
    return Speed(
        seconds=whole,
        requests_per_s=len(workload.requests) / whole,
        output_tokens_per_s=num_out / whole,
        total_tokens_per_s=(num_in + num_out) / whole,
        prefill_tokens_per_s=_prefill_rate(shape, precision, machine, workload, limits),
        decode_tokens_per_s=_decode_rate(steps, seconds),
        ttft_one_s=_ttft_of_one(shape, precision, machine, workload, limits),
        ttft_s=float(ttft.mean()),
        tpot_s=float((tpot * later).sum() / later.sum()),
        max_running=steps.max_running,
        num_steps=len(steps),
        phases=phases,
    )


def _options(shape: ModelShape, gpu: Gpu, precision: Precision, settings: PlanSettings) -> list[tuple[Layout, Fit]]:
    """Every possible layout with what fits in it, those with the fewest GPUs per replica first."""
    return [
        (each, fit(shape, gpu, precision, settings, tensor=each.tensor, pipeline=each.pipeline))
        for each in layouts(shape, gpu, settings)
    ]


def _predict(
    shape: ModelShape,
    gpu: Gpu,
    workload: Workload,
    precision: Precision,
    wanted: PlanSettings,
    layout: Layout,
    found: Fit,
    cache: dict[tuple[int, StepLimits], Steps],
) -> Prediction:
    problem, speed = _problem(found, workload, wanted), None
    if problem is None and found.settings is not None:
        limits, share = limits_of(found.settings), _share(workload, layout.replicas)
        key = (layout.replicas, limits)
        if key not in cache:
            cache[key] = simulate(share, limits)
        machine = Machine(
            gpu,
            constants_of(gpu),
            layout.tensor,
            layout.pipeline,
            layout.whole_experts,
            streamed_bytes=found.memory.streamed.num_bytes,
        )
        speed = _of_all_replicas(speed_of(shape, precision, machine, share, limits, steps=cache[key]), layout.replicas)
    max_running = 0 if speed is None else speed.max_running
    return Prediction(
        model=shape,
        gpu=gpu,
        workload=workload,
        precision=precision,
        layout=layout,
        layout_reason="",
        memory=found.memory,
        settings=found.settings,
        speed=speed,
        error=error_band(
            gpu,
            precision,
            shape,
            num_gpus=layout.num_gpus,
            max_running=max_running,
            streams=bool(found.memory.streamed.indexes),
        ),
        problem=problem,
        notes=tuple(_notes(shape, gpu, precision, layout, found.memory)),
    )


def _problem(found: Fit, workload: Workload, wanted: PlanSettings) -> str | None:
    memory = found.memory
    if not memory.fits:
        parts = memory.weights + memory.activations + memory.runtime + memory.states + memory.adapters
        return (
            f"weights of {gib(memory.weights)}, {f'states of {gib(memory.states)}, ' if memory.states else ''}"
            f"steps of {gib(memory.activations)} and {gib(memory.runtime)} for "
            f"CUDA graphs take {gib(parts)} of the {gib(memory.allowed)} that may be used; {gib(memory.shortfall)} "
            "are missing"
        )
    if wanted.max_model_len is not None and memory.max_model_len > memory.cache_tokens + 1:
        return (
            f"max_model_len={memory.max_model_len:,} needs {memory.max_model_len - 1:,} tokens of KV cache, and there "
            f"is room for {memory.cache_tokens:,}"
        )
    if workload.max_len > memory.max_model_len:
        return (
            f"the longest request of the workload has {workload.max_len:,} tokens, and max_model_len is "
            f"{memory.max_model_len:,}"
        )
    if workload.max_len > memory.cache_tokens:
        return (
            f"the longest request of the workload has {workload.max_len:,} tokens, and the KV cache holds "
            f"{memory.cache_tokens:,} ({gib(memory.cache)} at {memory.bytes_per_token / 1024:,.1f} KiB per token)"
        )
    return None


def _notes(shape: ModelShape, gpu: Gpu, precision: Precision, layout: Layout, memory: Memory) -> list[str]:
    notes = []
    if memory.streamed.indexes:
        notes.append(_note_on_streaming(shape, gpu, memory.streamed))
    if shape.why_not_run is not None:
        notes.append(f"Headrace does not run this model yet: {shape.why_not_run}")
    if keeps_experts(shape, precision):
        notes.append(f"Headrace keeps experts in 16 bits; this plan counts them as {precision.label}")
    if not gpu.runs_headrace:
        notes.append(f"Headrace does not run on {gpu.title} yet: it needs a CUDA GPU or a CPU")
    if shape.state_bytes:
        notes.append(
            "no model with a recurrent state was measured: the stated error does not cover it, and the time of its "
            "prompts is that of its GEMMs only"
        )
    if layout.num_gpus > 1:
        notes.append(_note_on_several_gpus(layout))
    return notes


def _note_on_streaming(shape: ModelShape, gpu: Gpu, streamed: StreamedLayers) -> str:
    link = gpu.host_link
    return (
        f"{len(streamed.indexes)} of {shape.num_layers} layers stream from host memory: every step copies "
        f"{gib(streamed.num_bytes)} to each GPU, {1e3 * streamed.num_bytes / link.copy_bytes_per_s:,.0f} ms at "
        f"{link.copy_bytes_per_s / 1e9:.0f} GB/s ({link.name}, assumed; not measured)"
    )


def _note_on_several_gpus(layout: Layout) -> str:
    if layout.tensor * layout.pipeline == 1:
        return f"{layout.replicas} replicas are {layout.replicas} engines: start one per GPU and divide the requests"
    return f"{layout.label}: the speed of several GPUs is predicted, and has not been measured"


def _share(workload: Workload, replicas: int) -> Workload:
    """What one of so many replicas gets: every n-th request, and its share of the clients."""
    if replicas == 1:
        return workload
    clients = None if workload.concurrency is None else max(1, workload.concurrency // replicas)
    return Workload(workload.name, workload.requests[::replicas], clients)


def _of_all_replicas(speed: Speed, replicas: int) -> Speed:
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "prefill_tokens_per_s")
    more = {name: getattr(speed, name) * replicas for name in (*rates, "decode_tokens_per_s")}
    return replace(speed, max_running=speed.max_running * replicas, **more)


def _prefill_rate(
    shape: ModelShape, precision: Precision, machine: Machine, workload: Workload, limits: StepLimits
) -> float:
    length = max(1, round(workload.mean_prompt_len))
    count = max(1, 4 * limits.max_num_batched_tokens // length)
    steps = simulate(of_lengths("prefill", [(length, 1)] * count), limits)
    return length * count / float(step_seconds(steps, shape, precision, machine).total.sum())


def _decode_rate(steps: Steps, seconds: StepSeconds) -> float:
    is_decode = (steps.prefill_tokens == 0) & (steps.decode_seqs > 0)
    spent = float(seconds.total[is_decode].sum())
    return float(steps.sampled[is_decode].sum()) / spent if spent else 0.0


def _ttft_of_one(
    shape: ModelShape, precision: Precision, machine: Machine, workload: Workload, limits: StepLimits
) -> float:
    length = max(1, round(workload.mean_prompt_len))
    steps = simulate(of_lengths("one", [(length, 1)]), limits)
    seconds = float(step_seconds(steps, shape, precision, machine).total.sum())
    # The stages of a pipeline work on one prompt one after the other.
    return seconds * machine.pipeline_parallel + machine.constants.request_seconds


def _min_gpus(fitting: list[tuple[Layout, Fit]]) -> int:
    return min(layout.tensor * layout.pipeline for layout, _ in fitting)


def _seconds(prediction: Prediction) -> float:
    return float("inf") if prediction.speed is None else prediction.speed.seconds
