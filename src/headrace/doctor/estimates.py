"""What plan's model of a device says about the evidence: the sides of the roofline, batches, memory and layouts.

Gains are ratios of two predictions of the same kind, so that an error that both have cancels out. They need the model's
shape and a GPU of plan's table. Constants are Headrace's on an H200, also where the engine is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.doctor.evidence import Evidence
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.plan.gpus import Gpu
    from headrace.plan.memory import Memory
    from headrace.plan.precision import Precision
    from headrace.plan.settings import PlanSettings

USUAL_PROMPT, USUAL_OUTPUT = 768, 256  # where lengths are not known: 1,024 tokens, as the engine assumes too
TARGET_KV_USE = 0.9  # of a cache that is to be used well and not to overflow


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The least seconds of one decode step on each side of the roofline: reading, and computing."""

    weights_s: float
    cache_s: float
    compute_s: float

    @property
    def memory_s(self) -> float:
        return self.weights_s + self.cache_s

    @property
    def is_bound_by_memory(self) -> bool:
        return self.memory_s >= self.compute_s


def device_of(evidence: Evidence) -> Gpu | None:
    """The GPU whose rates are known; a CPU's rates are not, unless they are measured."""
    return None if evidence.is_on_cpu else evidence.gpu


def decode_step(evidence: Evidence, batch: float) -> DecodeStep | None:
    """The two sides of the roofline for one decode step of so many sequences."""
    gpu, model, context = device_of(evidence), evidence.model, evidence.mean_context
    if gpu is None or model is None or context is None:
        return None
    import numpy as np

    from headrace.plan.memory import cache_bytes_per_token
    from headrace.plan.roofline import experts_hit

    precision = _precision(evidence, gpu)
    if precision is None:
        return None
    moe, tensor = model.experts, max(1.0, evidence.number("tensor_parallel_size") or 1.0)
    read = model.linear_params * precision.linear_bytes + model.head_params * precision.plain_bytes
    if moe is not None:
        hit = float(experts_hit(np.array([batch]), moe.num_experts, moe.num_chosen)[0])
        read += model.expert_params * precision.linear_bytes * hit
    cached = batch * context * cache_bytes_per_token(model, precision)
    compute = 2.0 * model.active_params * batch / precision.rate(gpu)
    return DecodeStep(read / gpu.bandwidth / tensor, cached / gpu.bandwidth / tensor, compute / tensor)


def batch_gain(evidence: Evidence, batch: float, larger: float) -> float | None:
    """By how much decoding gets faster with a larger batch, as a share."""
    if batch <= 0 or larger <= batch:
        return None
    seconds = [decode_seconds(evidence, each) for each in (batch, larger)]
    if seconds[0] is None or seconds[1] is None:
        return None
    return (larger / seconds[1]) / (batch / seconds[0]) - 1.0


def decode_seconds(evidence: Evidence, batch: float) -> float | None:
    """Predicted seconds of a decode step, with the fitted constants of plan."""
    gpu, model, context = device_of(evidence), evidence.model, evidence.mean_context
    if gpu is None or model is None or context is None:
        return None
    import numpy as np

    from headrace.plan.prediction import constants_of
    from headrace.plan.roofline import Machine, step_seconds
    from headrace.plan.simulate import Steps

    precision = _precision(evidence, gpu)
    if precision is None:
        return None
    num_seqs, none = np.array([max(1, round(batch))]), np.zeros(1, dtype=np.int64)
    steps = Steps(
        decode_seqs=num_seqs,
        prefill_tokens=none,
        prompts=none,
        sampled=num_seqs,
        context_tokens=num_seqs * float(context),
        pairs=none.astype(float),
        prefill_context=none.astype(float),
        arrival=none,
        first_token=none,
        end=none,
        max_running=int(num_seqs[0]),
    )
    machine = Machine(gpu, constants_of(gpu), int(evidence.number("tensor_parallel_size") or 1))
    return float(step_seconds(steps, model, precision, machine).total.sum())


def step_of_prompts(evidence: Evidence, num_tokens: float) -> float | None:
    """Predicted seconds of a step that is full of prompt tokens: the gap that decoding sequences see beside it."""
    gpu, model = device_of(evidence), evidence.model
    if gpu is None or model is None:
        return None
    precision = _precision(evidence, gpu)
    return None if precision is None else 2.0 * model.active_params * num_tokens / precision.rate(gpu)


def memory_of(evidence: Evidence, *, share: float | None = None, tensor: int | None = None) -> Memory | None:
    """What fits on the GPU with these settings."""
    gpu, model = device_of(evidence), evidence.model
    if gpu is None or model is None:
        return None
    from headrace.plan.memory import fit

    precision = _precision(evidence, gpu)
    settings = _plan_settings(evidence, share)
    if precision is None or settings is None:
        return None
    pipeline = int(evidence.number("pipeline_parallel_size") or 1)
    size = tensor if tensor is not None else int(evidence.number("tensor_parallel_size") or 1)
    try:
        return fit(model, gpu, precision, settings, tensor=max(1, size), pipeline=max(1, pipeline)).memory
    except (HeadraceError, ValueError, ZeroDivisionError):
        return None


def replicas_gain(evidence: Evidence, tensor: int) -> float | None:
    """By how much one engine per GPU is faster than one engine on all of them, as a share."""
    gpu, model = device_of(evidence), evidence.model
    settings = _plan_settings(evidence, None)
    if gpu is None or model is None or settings is None:
        return None
    from dataclasses import replace

    from headrace.plan.prediction import predict
    from headrace.plan.workload import uniform

    prompt, output = round(evidence.prompt_len or USUAL_PROMPT), round(evidence.output_len or USUAL_OUTPUT)
    work = uniform(max(1, prompt), max(1, output), num_requests=256)
    rates = []
    for size in (tensor, 1):
        wanted = replace(settings, num_gpus=tensor, tensor_parallel_size=size, pipeline_parallel_size=1)
        try:
            speed = predict(model, gpu, work, wanted).speed
        except (HeadraceError, ValueError):
            return None
        if speed is None:
            return None
        rates.append(speed.total_tokens_per_s)
    return rates[1] / rates[0] - 1.0


def tokens_per_sequence(evidence: Evidence) -> float:
    """Tokens that a sequence holds at its end; the usual ones if lengths are not known."""
    return (evidence.prompt_len or USUAL_PROMPT) + (evidence.output_len or USUAL_OUTPUT)


def has_known_lengths(evidence: Evidence) -> bool:
    return evidence.prompt_len is not None and evidence.output_len is not None


def _precision(evidence: Evidence, gpu: Gpu) -> Precision | None:
    from headrace.plan.precision import read_precision

    quantization = evidence.settings.get("quantization")
    try:
        return read_precision(
            str(quantization) if quantization in ("fp8", "int8", "int4") else None,
            "fp8" if evidence.has_fp8_cache else "auto",
            gpu,
        )
    except HeadraceError:
        return None


def _plan_settings(evidence: Evidence, share: float | None) -> PlanSettings | None:
    from headrace.plan.settings import PlanSettings

    def count(name: str) -> int | None:
        value = evidence.number(name)
        return int(value) if value is not None and value >= 1 else None

    own = evidence.number("gpu_memory_utilization")
    quantization = evidence.settings.get("quantization")
    longest = count("max_model_len")
    if longest is not None and evidence.model is not None:
        longest = min(longest, evidence.model.max_model_len)
    try:
        return PlanSettings(
            quantization=str(quantization) if quantization in ("fp8", "int8", "int4") else None,
            kv_cache_dtype="fp8" if evidence.has_fp8_cache else "auto",
            gpu_memory_utilization=share if share is not None else own if own and 0 < own <= 1 else None,
            max_model_len=longest,
            max_num_seqs=count("max_num_seqs"),
            max_num_batched_tokens=count("max_num_batched_tokens"),
            block_size=count("block_size") or 16,
            num_gpu_blocks_override=count("num_gpu_blocks_override"),
        )
    except HeadraceError:
        return None
