"""Builds what the ranks of an engine have alike: a decoder with weights, the memory of its largest step, a runner."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.dist.mesh import Mesh
from headrace.engine.memory_budget import GIB
from headrace.engine.offloading import sizes_of, streamed_layers
from headrace.engine.precision import BYTES_OF
from headrace.engine.settings import Settings
from headrace.engine.threads import cpus_of
from headrace.errors import ConfigError
from headrace.hardware import pinned_to
from headrace.models import Checkpoint, ModelSpec
from headrace.models.shards import Shards
from headrace.models.streamed_layers import NUM_BUFFERS, StreamedLayers, with_layers_on_disk
from headrace.runner.shape import RunnerShape
from headrace.startup import OnStage, ignore_stage
from headrace.steps import Runner

GPU_DEPTH = 2  # steps queued on a GPU beyond the one that runs, so that a slow step of the host costs nothing

if TYPE_CHECKING:
    import torch

    from headrace.dist.collectives import Groups, StageLink
    from headrace.models import Decoder  # imports torch, which a front without an engine of its own does not need
    from headrace.models.encoder import Encoder
    from headrace.models.weights.host_layers import Offload
    from headrace.runner.draft_model import Proposer


def with_small_sums(groups: Groups, config: EngineConfig, settings: Settings) -> Groups:
    """Lets small sums over GPUs take their own way (`runner/gpu/peer_sums.py`). All ranks must call it."""
    is_on_several_nodes = settings.ranks_per_node % settings.tensor_parallel_size != 0
    if settings.device != "cuda" or config.disable_custom_all_reduce or is_on_several_nodes:
        return groups
    from headrace.runner.gpu.peer_sums import with_peer_sums

    return with_peer_sums(groups)


def load_model(
    checkpoint: Checkpoint, settings: Settings, on_stage: OnStage, groups: Groups | None = None
) -> Decoder | Encoder:
    """Load the weights, or this rank's part of them."""
    import torch

    from headrace.models.weights import load, load_encoder
    from headrace.runner.cpu_threads import use_threads

    on_stage("load")
    with pinned_to(cpus_of(settings.cpu_affinity)):  # memory lies near the CPU that first writes to it
        use_threads(settings.threads_per_rank)
        if checkpoint.spec.is_encoder:
            assert groups is None
            return load_encoder.load_encoder(
                checkpoint,
                dtype=getattr(torch, settings.dtype),
                device=device_of(settings),
                load_format=settings.load_format,
                seed=settings.seed,
                max_len=settings.max_model_len,
                progress=lambda done, total: on_stage("load", done, total or 0),
            )
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
            stages=None if groups is None else _stages_of(groups, settings),
            offload=_offload(checkpoint.spec, settings, groups),
            adapters=settings.adapters,
        )


def _offload(spec: ModelSpec, settings: Settings, groups: Groups | None) -> Offload | None:
    """Which layers of this rank stay in host memory or on a disk, and how they come to its GPU."""
    if not settings.cpu_offload_gb:
        return None
    from headrace.models.weights.host_layers import Offload
    from headrace.runner.gpu.copy_stream import CopyStream, zeros_on
    from headrace.runner.gpu.pinned_memory import pinned_memory

    shards = Shards(spec, Mesh() if groups is None else groups.mesh)
    sizes = sizes_of(shards, element_bytes=BYTES_OF[settings.dtype], kind=settings.quantization)
    streamed = streamed_layers(sizes, settings.cpu_offload_gb)
    offload = Offload(
        indexes=frozenset(streamed.indexes),
        allocate_host=pinned_memory,
        allocate_buffers=partial(zeros_on, device_of(settings)),
        queue_for=CopyStream,
    )
    if settings.cpu_offload_path is None:
        return offload
    placed = with_layers_on_disk(streamed, sizes.layers, settings.cpu_offload_host_bytes)
    return offload if placed is None else _with_disk(offload, placed, settings.cpu_offload_path)


def _with_disk(offload: Offload, placed: StreamedLayers, path: str) -> Offload:
    """The same with some of the layers in a file."""
    from headrace.models.staged_reads import StagedReads
    from headrace.models.weights.layer_file import LayerFile, padded
    from headrace.runner.gpu.copy_stream import CopyStream
    from headrace.runner.gpu.pinned_memory import pinned_memory

    if not placed.disk_indexes:
        return offload
    file = LayerFile(Path(path))

    def queue_for(buffers: list[torch.Tensor]) -> CopyStream:
        file.write_back()
        largest = padded(max(layer.nbytes for layer in file.layers))
        staging = [pinned_memory(largest) for _ in range(min(NUM_BUFFERS, len(file.layers)))]
        return CopyStream(buffers, StagedReads(file.read, file.layers, staging))

    return replace(
        offload,
        disk_indexes=frozenset(placed.disk_indexes),
        allocate_on_disk=file.allocate,
        queue_for=queue_for,
    )


def _stages_of(groups: Groups, settings: Settings) -> StageLink | None:
    from headrace.dist.device_stage_link import DeviceStageLink

    stages = groups.stages
    return stages if stages is None or settings.device != "cuda" else DeviceStageLink(stages)


def device_of(settings: Settings) -> torch.device:
    """The device of this process: the GPU that is current, or the CPU."""
    import torch

    return torch.device(settings.device)


def measure_step(decoder: Decoder | Encoder, settings: Settings) -> int:
    """The memory of the largest step, measured on a GPU; 0 on a CPU, and for an encoder, which leaves none to a KV
    cache."""
    from headrace.models.encoder import Encoder

    if settings.device != "cuda" or isinstance(decoder, Encoder):
        return 0
    import torch

    from headrace.runner.gpu.memory import measure_step

    num_rows = 0 if settings.speculation is None else settings.speculation.max_rows
    num_seqs = max(settings.max_num_seqs, num_rows)
    return measure_step(
        decoder,
        num_tokens=settings.max_num_batched_tokens,
        num_seqs=num_seqs,
        kv_dtype=getattr(torch, settings.kv_dtype),
        uses_flash=settings.attention_backend == "FLASH_ATTN",
    )


def load_library_kernels(decoder: Decoder | Encoder, settings: Settings) -> None:
    """Load GEMM kernels of the library on a GPU whose other kernels are still being compiled."""
    from headrace.models.encoder import Encoder
    from headrace.runner.gpu import gemm_warmup

    if not isinstance(decoder, Encoder):
        gemm_warmup.load_library_kernels(decoder, settings.max_num_batched_tokens)


def graph_bytes(step_bytes: int, spec: ModelSpec, settings: Settings) -> int:
    """The memory of the CUDA graphs of prefill; 0 on a CPU, and for an encoder, which has none."""
    if settings.device != "cuda" or spec.is_encoder:
        return 0
    from headrace.runner.gpu.graph_sizes import prefill_graph_bytes

    return prefill_graph_bytes(step_bytes, spec, settings.max_num_batched_tokens)


def depth_of(settings: Settings) -> int:
    """How many steps are submitted ahead of the last applied one: in a pipeline one for each stage."""
    if settings.pipeline_parallel_size > 1:
        return settings.pipeline_parallel_size
    return GPU_DEPTH if settings.device == "cuda" else 1


def start_runner(
    model: Decoder | Encoder,
    settings: Settings,
    step_bytes: int,
    on_stage: OnStage = ignore_stage,
    *,
    draft: Decoder | None = None,
) -> Runner:
    """`draft`: the draft model, if there is one."""
    import torch

    from headrace.models.encoder import Encoder

    speculation = settings.speculation
    shape = RunnerShape(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        num_threads=settings.threads_per_rank,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_dtype=getattr(torch, settings.kv_dtype),
        num_host_blocks=settings.num_host_blocks,
        uses_flash=settings.attention_backend == "FLASH_ATTN",
        step_bytes=step_bytes,
        adapters=settings.adapters,
        max_draft_seqs=0 if speculation is None else speculation.max_seqs,
        max_draft_rows=0 if speculation is None else speculation.max_rows,
    )
    proposer = None if isinstance(model, Encoder) else _proposer(model, settings, draft)
    with pinned_to(cpus_of(settings.cpu_affinity)):  # threads that the runner starts inherit the mask
        if settings.device == "cuda":
            return _start_gpu_runner(model, shape, on_stage, proposer)
        if isinstance(model, Encoder):
            from headrace.runner.cpu_encoder_runner import CpuEncoderRunner

            return CpuEncoderRunner(model, shape, on_stage)
        from headrace.runner.cpu_runner import CpuRunner

        return CpuRunner(model, shape, on_stage, proposer)


def _proposer(decoder: Decoder, settings: Settings, draft: Decoder | None) -> Proposer | None:
    """What drafts tokens, if the host does not: the draft model, or the decoder's first layers."""
    from headrace.runner.draft_model import Proposer, first_layers

    num_layers = None if settings.speculation is None else settings.speculation.config.num_layers
    if num_layers is not None:
        return Proposer(first_layers(decoder, num_layers), shares_cache=True)
    return None if draft is None else Proposer(draft, shares_cache=False)


def _start_gpu_runner(
    model: Decoder | Encoder, shape: RunnerShape, on_stage: OnStage, proposer: Proposer | None
) -> Runner:
    import torch

    from headrace.models.encoder import Encoder
    from headrace.runner.gpu.encoder_runner import GpuEncoderRunner
    from headrace.runner.gpu.gpu_runner import GpuRunner

    try:
        if isinstance(model, Encoder):
            return GpuEncoderRunner(model, shape, on_stage)
        return GpuRunner(model, shape, on_stage, proposer)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"the GPU has no room for {shape.num_blocks:,} cache blocks and the CUDA graphs of {shape.max_num_seqs:,} "
            f"sequences: {free / GIB:.1f} of {total / GIB:.1f} GiB are free; lower gpu_memory_utilization, "
            "max_num_seqs or max_num_batched_tokens, or stop other processes on the GPU"
        ) from error
