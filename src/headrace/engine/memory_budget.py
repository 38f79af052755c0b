"""What the memory of one rank holds: weights, recurrent states, what steps need, and the blocks of the KV cache that
fit beside them. A part of `resolve`; it only counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.adapters import AdapterLimits
from headrace.config import EngineConfig, Quantization
from headrace.engine.offloading import gpu_bytes, sizes_of, streamed_layers
from headrace.engine.precision import BYTES_OF
from headrace.engine.rank_layout import RankLayout
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.models.adapter_spec import adapter_bytes
from headrace.models.spec import ModelSpec
from headrace.models.streamed_layers import StreamedLayers
from headrace.models.weight_sizes import WeightSizes

GIB = 2**30
MIB = 2**20
CPU_MEMORY_SHARE = 0.5
GPU_MEMORY_SHARE = 0.92
STATE_SHARE = 0.5  # of the memory beside weights and steps, for the recurrent states of all slots
STATE_SHARE_ALONE = 0.9  # the same without a KV cache
GPU_RUNTIME_BYTES = 1 << 30  # CUDA graphs, library workspaces, memory that the allocator cannot reuse
GPU_BATCHED_TOKENS = 8192  # the default of max_num_batched_tokens on a GPU


@dataclass(frozen=True, slots=True)
class AllowedMemory:
    num_bytes: int  # that the engine may use
    for_steps: int  # bytes of these that steps need
    source: str  # where `num_bytes` comes from


class MemoryBudget:
    """The bytes of everything, once the number formats are decided."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        facts: MachineFacts,
        *,
        ranks: RankLayout,
        on_gpu: bool,
        dtype: str,
        kv_dtype: str,
        kind: Quantization | None,
        draft: ModelSpec | None,
        adapters: AdapterLimits | None,
    ) -> None:
        """`kind`: how the layers' matrices are quantized in memory; `draft`: the draft model, if there is one."""
        self._config, self._spec, self._facts = config, spec, facts
        self._ranks, self._on_gpu = ranks, on_gpu
        self.kind, self._draft, self._adapters = kind, draft, adapters
        self.dtype = dtype
        self._dtype_bytes, self._kv_dtype_bytes = BYTES_OF[dtype], BYTES_OF[kv_dtype]
        self._known_sizes: dict[int, WeightSizes] = {}  # by stage

    # ---- memory that may be used

    def allowed(self, max_num_seqs: int) -> AllowedMemory:
        return self._allowed_on_gpu(max_num_seqs) if self._on_gpu else self._allowed_on_cpu()

    def _allowed_on_cpu(self) -> AllowedMemory:
        share, free = self._config.gpu_memory_utilization or CPU_MEMORY_SHARE, self._facts.free_memory
        source = f"{share:.0%} of {free / GIB:.1f} GiB free memory{self._over_ranks}, taken as it is used"
        return AllowedMemory(int(free * share) // self._ranks.num_per_device, 0, source)

    def _allowed_on_gpu(self, max_num_seqs: int) -> AllowedMemory:
        """The share is of the whole GPU, so that the shares of several engines add up; others' memory counts."""
        gpu = self._facts.gpu
        assert gpu is not None
        share = self._config.gpu_memory_utilization or GPU_MEMORY_SHARE
        allowed = min(int(gpu.total_memory * share), gpu.free_memory)
        source = f"{share:.0%} of {gpu.total_memory / GIB:.1f} GiB"
        if allowed == gpu.free_memory:
            source = f"the {allowed / GIB:.1f} GiB that other processes have left"
        allowed, source = allowed // self._ranks.num_per_device, source + self._over_ranks
        for_steps = self._step_bytes(max_num_seqs) if gpu.step_memory is None else gpu.step_memory
        return AllowedMemory(allowed, for_steps + GPU_RUNTIME_BYTES, source)

    @property
    def _over_ranks(self) -> str:
        return f", over {self._ranks.num_per_device} ranks" if self._ranks.num_per_device > 1 else ""

    def _step_bytes(self, max_num_seqs: int) -> int:
        """A first estimate, before a step is measured: the widest activations and two sets of logits."""
        spec, num_tokens = self._ranks.first_shards.spec, self._config.max_num_batched_tokens or GPU_BATCHED_TOKENS
        activations = num_tokens * (3 * spec.mlp_width + 4 * spec.hidden_size + spec.attention_activations)
        return 2 * (activations + 2 * max_num_seqs * spec.vocab_size)

    # ---- weights

    @property
    def weight_bytes(self) -> int:
        """The weights of the rank with the most: the first stage also has the embeddings, the last one the head."""
        draft, adapters = self._draft, self._adapters
        of_draft = 0 if draft is None else self._ranks.shards_of_draft(draft).num_params * self._dtype_bytes
        of_adapters = 0 if adapters is None else adapter_bytes(self._spec, adapters, self._dtype_bytes)
        weights = max(gpu_bytes(self._sizes(stage), self.streamed(stage)) for stage in self._ranks.end_stages)
        return weights + of_draft + of_adapters

    def streamed(self, stage: int = 0) -> StreamedLayers:
        """The layers of a stage that stream from host memory. The first stage has the most."""
        return streamed_layers(self._sizes(stage), self._config.cpu_offload_gb if self._on_gpu else 0.0)

    @property
    def layer_bytes(self) -> Sequence[int]:
        """Bytes of each layer of a rank of the first stage."""
        return self._sizes(0).layers

    def _sizes(self, stage: int) -> WeightSizes:
        if stage not in self._known_sizes:  # a mixture has thousands of tensors
            shards = self._ranks.shards_of(stage)
            self._known_sizes[stage] = sizes_of(shards, element_bytes=self._dtype_bytes, kind=self.kind)
        return self._known_sizes[stage]

    # ---- recurrent states

    def state_bytes(self, max_num_seqs: int) -> int:
        num_padding = int(self._on_gpu)
        return (max_num_seqs + num_padding) * self.state_bytes_per_slot

    @property
    def state_bytes_per_slot(self) -> int:
        return self._spec.state_bytes(self._dtype_bytes)

    def num_seqs_with_states(self, max_seqs: int) -> int:
        """How many sequences' states fit into their share of the memory, up to `max_seqs`."""
        each = self.state_bytes_per_slot
        if not each:
            return max_seqs
        memory = self.allowed(max_seqs)
        free = memory.num_bytes - memory.for_steps - self.weight_bytes
        share = STATE_SHARE if self._spec.num_attention_layers else STATE_SHARE_ALONE
        return max(1, min(max_seqs, int(free * share) // each))

    # ---- blocks of the KV cache

    @property
    def block_bytes(self) -> int:
        """A block of the model and of its draft model."""
        draft = self._draft
        of_draft = 0 if draft is None else self._ranks.shards_of_draft(draft).spec.kv_elements_per_token
        return self._block_bytes(self._ranks.first_shards.spec.kv_elements_per_token + of_draft)

    @property
    def block_bytes_without_draft(self) -> int:
        return self._block_bytes(self._ranks.first_shards.spec.kv_elements_per_token)

    def _block_bytes(self, elements_per_token: int) -> int:
        return elements_per_token * self._kv_dtype_bytes * self._config.block_size

    @property
    def num_blocks_as_set(self) -> int | None:
        config = self._config
        if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is None:
            return config.num_gpu_blocks_override
        block_bytes = self.block_bytes
        if not block_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} has no meaning for {self._spec.family}, which "
                "has no attention and so no KV cache; leave it out"
            )
        if config.kv_cache_memory_bytes < block_bytes:
            raise ConfigError(
                f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} is less than one block of "
                f"{config.block_size} tokens, which takes {block_bytes:,} bytes"
            )
        return config.kv_cache_memory_bytes // block_bytes

    def num_blocks_that_fit(self, max_num_seqs: int) -> int:
        """Blocks that fit beside the weights and the steps of `max_num_seqs` sequences; may be less than one."""
        memory = self.allowed(max_num_seqs)
        taken = self.weight_bytes + memory.for_steps + self.state_bytes(max_num_seqs)
        block_bytes = self.block_bytes
        if not block_bytes:  # no attention: blocks are only counted
            return self.max_blocks(max_num_seqs) if taken <= memory.num_bytes else 0
        return (memory.num_bytes - taken) // block_bytes

    def max_blocks(self, max_num_seqs: int) -> int:
        """Those of `max_num_seqs` whole contexts."""
        context = self._config.max_model_len or self._spec.max_model_len
        return max_num_seqs * -(-context // self._config.block_size)

    def refuse_more(self, *, num_blocks: int, max_num_seqs: int) -> None:
        """Refuses a KV cache that the device could not hold even if it were empty."""
        gpu, config = self._facts.gpu, self._config
        total = gpu.total_memory if self._on_gpu and gpu is not None else self._facts.total_memory
        total //= self._ranks.num_per_device
        cache, weights = num_blocks * self.block_bytes, self.weight_bytes + self.state_bytes(max_num_seqs)
        if cache + weights <= total:
            return
        name = "kv_cache_memory_bytes" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
        raise ConfigError(
            f"{name}={getattr(config, name):,} is a KV cache of {cache / GIB:,.1f} GiB; with weights of "
            f"{weights / GIB:,.1f} GiB it does not fit into {total / GIB:,.1f} GiB of memory; lower it or leave it out"
        )
