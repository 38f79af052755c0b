"""The settings that an engine runs with: every value decided, every automatic one with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headrace.adapters import AdapterLimits
from headrace.config import CapacityPolicy, LoadFormat, Quantization, QueuePolicy
from headrace.dist.mesh import Mesh
from headrace.sched import SchedulerLimits
from headrace.speculation import Speculation

Source = Literal["given", "automatic", "default", "reported"]


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """One setting that a running engine uses. `given`: by the user; `automatic`: chosen by the engine, with a reason;
    `default`: the engine's constant; `reported`: read from its log or metrics. Listed by `in_force`."""

    value: Any
    source: Source
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One decided setting and its reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The result of `resolve`: no value is automatic any more."""

    device: str
    dtype: str
    kv_dtype: str
    load_format: LoadFormat
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    queue_policy: QueuePolicy
    capacity_policy: CapacityPolicy
    seed: int
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()  # values that are allowed and probably a mistake, one line each
    quantization: Quantization | None = None
    attention_backend: str = "CPU_ATTN"  # see `attention.py`
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    nnodes: int = 1
    cpu_offload_gb: float = 0.0  # 0 on a CPU
    cpu_offload_path: str | None = None  # None: all streamed layers are in host memory
    cpu_offload_host_bytes: int = 0  # of one rank, for streamed layers; more of them are in the path
    cpu_affinity: str = "none"  # CPUs of the engine's threads as a list (0-7,16), or "none"
    full_step_tokens: int = 1 << 30  # see SchedulerLimits
    full_rate_seqs: int | None = None  # fewer running sequences waste the device; None: max_num_seqs
    min_free_slots_to_start: int = 1  # see SchedulerLimits
    speculation: Speculation | None = None
    has_recurrent_state: bool = False  # see SchedulerLimits
    kv_offload_gib: float = 0.0  # of the host tier: see `engine/kv_offloading.py`
    kv_offload_path: str | None = None
    kv_offload_disk_gib: float = 0.0
    num_host_blocks: int = 0  # see SchedulerLimits
    host_block_bytes: int = 0
    adapters: AdapterLimits | None = None  # None: no adapters can be loaded

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.nnodes

    def ranks_of_node(self, node: int) -> range:
        """Consecutive ones: stages of a pipeline, or parts of a stage."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    @property
    def parallel_sizes(self) -> str:
        """The sizes above 1, for messages."""
        sizes = {name: getattr(self, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
        return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    def mesh_of(self, rank: int) -> Mesh:
        return Mesh.of_rank(
            rank,
            tensor_size=self.tensor_parallel_size,
            pipeline_size=self.pipeline_parallel_size,
            whole_experts=self.enable_expert_parallel,
        )

    @property
    def threads_per_rank(self) -> int:
        return max(1, self.num_threads // self.ranks_per_node)

    @property
    def kv_cache_size_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_cache_max_concurrency(self) -> float:
        """How many sequences of the full context length the KV cache holds."""
        return round(self.kv_cache_size_tokens / self.max_model_len, 2)

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            queue_policy=self.queue_policy,
            capacity_policy=self.capacity_policy,
            full_step_tokens=self.full_step_tokens,
            min_free_slots_to_start=self.min_free_slots_to_start,
            num_stages=self.pipeline_parallel_size,
            speculation=self.speculation,
            has_recurrent_state=self.has_recurrent_state,
            num_host_blocks=self.num_host_blocks,
            host_block_bytes=self.host_block_bytes,
        )
