"""What fits: weights, steps, CUDA graphs and KV cache of one GPU of a layout. Agrees with `engine.resolve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.dist.mesh import Mesh
from headrace.engine.memory_budget import GPU_BATCHED_TOKENS, GPU_RUNTIME_BYTES, STATE_SHARE, STATE_SHARE_ALONE
from headrace.engine.resolve_decoder import CPU_FULL_RATE_SEQS
from headrace.engine.resolver import GPU_MAX_SEQS
from headrace.engine.settings import Settings
from headrace.models.shards import Shards
from headrace.models.streamed_layers import NONE_STREAMED, StreamedLayers, choose_streamed
from headrace.models.weight_sizes import WeightSizes, weight_sizes
from headrace.plan.gpus import GIB, Gpu
from headrace.plan.precision import Precision
from headrace.plan.settings import PlanSettings, adapter_bytes_of, resolve_for
from headrace.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU. `cache_tokens` is for all GPUs of a replica together: each holds a part of every token."""

    total: int
    allowed: int  # the share that the engine may use
    weights: int
    activations: int
    runtime: int  # CUDA graphs and library workspaces
    cache: int
    cache_tokens: int
    bytes_per_token: float  # of the cache, on one GPU
    max_model_len: int  # as set, or the model's own
    states: int = 0  # recurrent states of all slots
    streamed: StreamedLayers = NONE_STREAMED  # from host memory; `weights` are those on the GPU
    adapters: int = 0  # tables of LoRA adapters

    @property
    def shortfall(self) -> int:
        """Bytes that are missing for a cache of one block; 0: it fits."""
        beside = self.activations + self.runtime + self.states + self.adapters
        needed = self.weights + beside + int(16 * self.bytes_per_token)
        return max(0, needed - self.allowed)

    @property
    def fits(self) -> bool:
        return self.shortfall == 0

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that fits: of the model's own context, or of the cache."""
        return min(self.max_model_len, self.cache_tokens)

    def concurrency(self, tokens_per_seq: float) -> int:
        """How many sequences of this length the cache holds at once."""
        return int(self.cache_tokens // max(1.0, tokens_per_seq)) if self.fits else 0


@dataclass(frozen=True, slots=True)
class Fit:
    memory: Memory
    settings: Settings | None  # as the engine would resolve them; None: it does not fit


def weight_bytes(shape: ModelShape, precision: Precision) -> int:
    return _sizes(shape, precision).total


def _sizes(shape: ModelShape, precision: Precision) -> WeightSizes:
    stored = None if shape.spec is None else (shape.spec.packed_bits, shape.spec.quantization)
    return _sizes_as_stored(shape, precision, stored)


@lru_cache(maxsize=64)  # a mixture has thousands of tensors
def _sizes_as_stored(shape: ModelShape, precision: Precision, stored: object) -> WeightSizes:
    """As the engine counts them, if it runs the model; else all layers have the same size. Experts are counted as if a
    GPU could multiply by INT8 (`prediction._notes` says so). `stored`: what the size also depends on, which is not
    compared between shapes."""
    spec = shape.spec
    if spec is not None and not keeps_experts(shape, precision):
        shards, at_load = Shards(spec, Mesh()), spec.quantization is None
        kind = precision.quantization
        return weight_sizes(shards, element_bytes=precision.plain_bytes, kind=kind, at_load=at_load)
    quantized = shape.linear_params + shape.expert_params
    each = int(quantized * precision.linear_bytes / shape.num_layers)
    return WeightSizes((each,) * shape.num_layers, (shape.num_params - quantized) * precision.plain_bytes)


def keeps_experts(shape: ModelShape, precision: Precision) -> bool:
    """Whether the engine keeps experts in 16 bits where the other matrices are in this format."""
    return shape.has_mixture and precision.weights == "int8" and not precision.is_wide


def cache_bytes_per_token(shape: ModelShape, precision: Precision) -> int:
    return shape.kv_elements_per_token * precision.cache_bytes


def _weight_bytes_per_gpu(
    shape: ModelShape, precision: Precision, tensor: int, pipeline: int, *, whole_experts: bool
) -> int:
    """Of the GPU with the most: whole experts may not divide evenly."""
    num_bytes = weight_bytes(shape, precision)
    if not whole_experts or shape.experts is None:
        return -(-num_bytes // (tensor * pipeline))
    of_experts, count = int(shape.expert_params * precision.linear_bytes), shape.experts.num_experts
    share = -(-count // tensor) / count
    return int((num_bytes - of_experts) / tensor / pipeline + of_experts * share / pipeline)


def _streamed(
    shape: ModelShape, gpu: Gpu, precision: Precision, settings: PlanSettings, tensor: int, pipeline: int
) -> StreamedLayers:
    """The layers of one GPU that stream from host memory."""
    if gpu.is_cpu or not settings.cpu_offload_gb:
        return NONE_STREAMED
    stage = _sizes(shape, precision).layers[: -(-shape.num_layers // pipeline)]
    return choose_streamed([num_bytes // tensor for num_bytes in stage], int(settings.cpu_offload_gb * GIB))


def fit(
    shape: ModelShape, gpu: Gpu, precision: Precision, settings: PlanSettings, *, tensor: int = 1, pipeline: int = 1
) -> Fit:
    """Memory of one GPU, and the engine's settings with it."""
    usual_seqs = _usual_seqs(shape, gpu, precision, settings)
    first = _memory(shape, gpu, precision, settings, tensor, pipeline, settings.max_num_seqs or usual_seqs)
    if not first.fits:
        return Fit(first, None)
    resolved = resolve_for(shape, gpu, precision, settings, num_blocks=_blocks(first, settings))
    memory = _memory(shape, gpu, precision, settings, tensor, pipeline, resolved.max_num_seqs)
    # The engine decides on the number of sequences once: with the memory that fewer of them leave, it may be another.
    settings = replace(settings, max_num_seqs=resolved.max_num_seqs)
    resolved = resolve_for(shape, gpu, precision, settings, num_blocks=_blocks(memory, settings))
    # More blocks than all sequences could ever need are not allocated.
    most = resolved.max_num_seqs * -(-memory.max_model_len // settings.block_size)
    if settings.num_gpu_blocks_override is None and most < _blocks(memory, settings):
        resolved = resolve_for(shape, gpu, precision, settings, num_blocks=most)
    return Fit(memory, resolved)


def _usual_seqs(shape: ModelShape, gpu: Gpu, precision: Precision, settings: PlanSettings) -> int:
    """The most sequences before the size of the KV cache is considered."""
    most = CPU_FULL_RATE_SEQS if gpu.is_cpu else GPU_MAX_SEQS
    if not shape.state_bytes:
        return most
    beside = _memory(shape, gpu, precision, settings, 1, 1, 0)
    free = beside.allowed - beside.weights - beside.activations - beside.runtime
    share = STATE_SHARE if shape.kv_elements_per_token else STATE_SHARE_ALONE
    return max(1, min(most, int(free * share) // shape.state_bytes))


def _blocks(memory: Memory, settings: PlanSettings) -> int:
    return settings.num_gpu_blocks_override or max(1, memory.cache_tokens // settings.block_size)


def _memory(
    shape: ModelShape,
    gpu: Gpu,
    precision: Precision,
    settings: PlanSettings,
    tensor: int,
    pipeline: int,
    max_num_seqs: int,
) -> Memory:
    allowed = int(gpu.memory_bytes * settings.memory_share(gpu))
    whole_experts = settings.enable_expert_parallel and tensor > 1
    streamed = _streamed(shape, gpu, precision, settings, tensor, pipeline)
    weights = _weight_bytes_per_gpu(shape, precision, tensor, pipeline, whole_experts=whole_experts)
    weights -= streamed.freed_bytes
    activations = 0 if gpu.is_cpu else _step_bytes(shape, settings, max_num_seqs) // tensor
    runtime = 0 if gpu.is_cpu else GPU_RUNTIME_BYTES
    per_token = cache_bytes_per_token(shape, precision) / (min(tensor, shape.num_kv_heads) * pipeline)
    states = (max_num_seqs if gpu.is_cpu else max_num_seqs + 1) * shape.state_bytes  # a GPU has a slot for padding
    adapters = adapter_bytes_of(shape, precision, settings)
    room = max(0, allowed - weights - activations - runtime - states - adapters)
    max_model_len = min(settings.max_model_len or shape.max_model_len, shape.max_model_len)
    if per_token:
        tokens = int(room // (per_token * settings.block_size)) * settings.block_size
    else:  # no attention: every sequence may have its whole context
        tokens = max_num_seqs * -(-max_model_len // settings.block_size) * settings.block_size
    if settings.num_gpu_blocks_override is not None:
        tokens = settings.num_gpu_blocks_override * settings.block_size
    return Memory(
        total=gpu.memory_bytes,
        allowed=allowed,
        weights=weights,
        activations=activations,
        runtime=runtime,
        cache=int(tokens * per_token),
        cache_tokens=tokens,
        bytes_per_token=per_token,
        max_model_len=max_model_len,
        states=states,
        streamed=streamed,
        adapters=adapters,
    )


def _step_bytes(shape: ModelShape, settings: PlanSettings, max_num_seqs: int) -> int:
    """The widest activations and two sets of logits, as `engine.resolve` estimates them before it measures."""
    num_tokens = settings.max_num_batched_tokens or GPU_BATCHED_TOKENS
    widest = 3 * shape.mlp_width + 4 * shape.hidden_size + shape.q_size + 2 * shape.kv_size
    return 2 * (num_tokens * widest + 2 * max_num_seqs * shape.vocab_size)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
