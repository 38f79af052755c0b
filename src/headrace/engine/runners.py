"""Builds what the ranks of an engine have alike: a decoder with weights, the memory of its largest step, a runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.engine.resolve import GIB
from headrace.engine.settings import Settings
from headrace.engine.threads import cpus_of
from headrace.errors import ConfigError
from headrace.hardware import pinned_to
from headrace.models import Checkpoint, ModelSpec
from headrace.runner.shape import RunnerShape
from headrace.startup import OnStage, ignore_stage
from headrace.steps import Runner

GPU_DEPTH = 2  # steps queued on a GPU beyond the one that runs, so that a slow step of the host costs nothing

if TYPE_CHECKING:
    import torch

    from headrace.dist.collectives import Groups
    from headrace.models import Decoder  # imports torch, which a front without an engine of its own does not need


def load_decoder(
    checkpoint: Checkpoint, settings: Settings, on_stage: OnStage, groups: Groups | None = None
) -> Decoder:
    """Load the weights, or this rank's part of them."""
    import torch

    from headrace.models.weights import load
    from headrace.runner.cpu_threads import use_threads

    on_stage("load")
    with pinned_to(cpus_of(settings.cpu_affinity)):  # memory lies near the CPU that first writes to it
        use_threads(settings.threads_per_rank)
        return load.load_decoder(
            checkpoint,
            dtype=getattr(torch, settings.dtype),
            device=device_of(settings),
            quantization=settings.quantization,
            load_format=settings.load_format,
            seed=settings.seed,
            max_len=settings.max_model_len,
            progress=lambda done, total: on_stage("load", done, total or 0),
            group=None if groups is None else groups.tensor,
            stages=None if groups is None else groups.stages,
        )


def device_of(settings: Settings) -> torch.device:
    """The device of this process: the GPU that is current, or the CPU."""
    import torch

    return torch.device(settings.device)


def measure_step(decoder: Decoder, settings: Settings) -> int:
    """The memory of the largest step, measured on a GPU; 0 on a CPU."""
    if settings.device != "cuda":
        return 0
    from headrace.runner.gpu.memory import measure_step

    num_rows = 0 if settings.speculation is None else settings.speculation.max_rows
    num_seqs = max(settings.max_num_seqs, num_rows)
    return measure_step(decoder, num_tokens=settings.max_num_batched_tokens, num_seqs=num_seqs)


def graph_bytes(step_bytes: int, spec: ModelSpec, settings: Settings) -> int:
    """The memory of the CUDA graphs of prefill; 0 on a CPU."""
    if settings.device != "cuda":
        return 0
    from headrace.runner.gpu.graph_sizes import prefill_graph_bytes

    return prefill_graph_bytes(step_bytes, spec, settings.max_num_batched_tokens)


def depth_of(settings: Settings) -> int:
    """How many steps are submitted ahead of the last applied one: in a pipeline one for each stage."""
    if settings.pipeline_parallel_size > 1:
        return settings.pipeline_parallel_size
    return GPU_DEPTH if settings.device == "cuda" else 1


def start_runner(
    decoder: Decoder,
    settings: Settings,
    step_bytes: int,
    on_stage: OnStage = ignore_stage,
    *,
    draft: Decoder | None = None,
) -> Runner:
    """`draft`: the draft model, if there is one."""
    import torch

    from headrace.runner.draft_model import first_layers

    speculation = settings.speculation
    shape = RunnerShape(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        num_threads=settings.threads_per_rank,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_dtype=getattr(torch, settings.kv_dtype),
        step_bytes=step_bytes,
        max_draft_seqs=0 if speculation is None else speculation.max_seqs,
        max_draft_rows=0 if speculation is None else speculation.max_rows,
    )
    num_layers = None if speculation is None else speculation.config.num_layers
    if num_layers is not None:
        draft = first_layers(decoder, num_layers)
    in_same_cache = num_layers is not None
    with pinned_to(cpus_of(settings.cpu_affinity)):  # threads that the runner starts inherit the mask
        if settings.device == "cuda":
            return _start_gpu_runner(decoder, shape, on_stage, draft, in_same_cache=in_same_cache)
        from headrace.runner.cpu_runner import CpuRunner

        return CpuRunner(decoder, shape, on_stage, draft=draft, drafts_in_same_cache=in_same_cache)


def _start_gpu_runner(
    decoder: Decoder, shape: RunnerShape, on_stage: OnStage, draft: Decoder | None, *, in_same_cache: bool
) -> Runner:
    import torch

    from headrace.runner.gpu.gpu_runner import GpuRunner

    try:
        return GpuRunner(decoder, shape, on_stage, draft=draft, drafts_in_same_cache=in_same_cache)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"the GPU has no room for {shape.num_blocks:,} cache blocks and the CUDA graphs of {shape.max_num_seqs:,} "
            f"sequences: {free / GIB:.1f} of {total / GIB:.1f} GiB are free; lower gpu_memory_utilization, "
            "max_num_seqs or max_num_batched_tokens, or stop other processes on the GPU"
        ) from error
