"""Turns the user's config, the model and the machine into settings: one function, and a reason for each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from headrace.adapters import DEFAULT_MAX_LORAS, AdapterLimits
from headrace.config import EngineConfig, Quantization
from headrace.engine.attention import choose_attention
from headrace.engine.kv_offloading import Offload, choose_offload
from headrace.engine.offloading import (
    WeightOffload,
    choose_weight_offload,
    describe_offload,
    disk_warning,
    gpu_bytes,
    offload_warning,
    sizes_of,
    streamed_layers,
)
from headrace.engine.rank_layout import RankLayout
from headrace.engine.settings import Choice, Settings
from headrace.engine.speculating import check_speculation, choose_speculation
from headrace.engine.threads import MAX_THREADS_PER_CORE, Threads, choose_threads
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.models.adapter_spec import adapter_bytes, why_not_adapted
from headrace.models.quantized import StoredQuantization
from headrace.models.spec import ModelSpec
from headrace.models.streamed_layers import StreamedLayers
from headrace.models.weight_sizes import WeightSizes
from headrace.speculation import Speculation

GIB = 2**30
MIB = 2**20
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MIN_CAPABILITY = (8, 0)  # from which GPUs compute in bfloat16 and copy to shared memory in the background: Ampere
FP8_CAPABILITY = (8, 9)  # compute capability from which a GPU has FP8 tensor cores: Ada, Hopper

# A sequence is hardly ever shorter. If the KV cache held fewer of these than there are slots, most would be preempted.
MIN_SEQ_TOKENS = 64

# On a CPU a step reads all weights from memory; with this many sequences that is a small part of its time.
CPU_FULL_RATE_SEQS = 128
CPU_BATCHED_TOKENS = 512
CPU_MEMORY_SHARE = 0.5

# GEMMs reach the full rate of a GPU from about 512 rows on, if tiles of 128 x 128 of the narrowest GEMM fill its
# processors, of which there are about 128. More sequences pay only if the KV cache holds them up to a usual length:
# otherwise they make every step longer, and wait for each other.
GPU_MIN_FULL_RATE_SEQS = 512
GPU_MAX_SEQS = 1024
GPU_USUAL_TOKENS = 1024
GPU_TILE_AREA = 128 * 128 * 128
GPU_BATCHED_TOKENS = 8192
GPU_MEMORY_SHARE = 0.92
MAX_MEMORY_SHARE = 0.95  # above it, a warning: peaks that were not measured, and other processes, need memory too
STATE_SHARE = 0.5  # of the memory beside weights and steps, for the recurrent states of all slots
STATE_SHARE_ALONE = 0.9  # the same without a KV cache
MAX_SLOT_SHARE = 0.1  # of the memory that may be used, for logits and tables of all slots; above it, a warning
CPU_MIN_BLOCK_SIZE = 8  # tokens in a vector of a CPU without AVX-512; keys in smaller blocks are copied before use
GPU_RUNTIME_BYTES = 1 << 30  # CUDA graphs, library workspaces, memory that the allocator cannot reuse
GPU_FULL_STEP_TOKENS = 2048  # GEMMs reach their full rate long before; a prompt need not be chunked to fill such a step
_QUANTIZED: dict[Quantization, str] = {
    "fp8": "weights and activations of the layers in eight bits",
    "int8": "weights and activations of the layers in eight bits",
    "int4": "weights of the layers in four bits",
}
GPU_START_FRACTION = 32  # when all slots are taken, new sequences start once 1/32 of the slots are free


def resolve(config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None = None) -> Settings:
    """`draft`: the draft model of speculative decoding, where there is one and it is known."""
    return _resolver(config, spec, facts, draft).settings()


def resolve_here(
    config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None = None
) -> Settings:
    """The same for an engine that is about to start: a KV cache that this machine can never hold is refused. (`plan`
    resolves for several GPUs at once.)"""
    resolver = _resolver(config, spec, facts, draft)
    settings = resolver.settings()
    resolver.refuse_more_than_memory(settings)
    return settings


def _resolver(config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None) -> Resolver:
    from headrace.engine.resolve_encoder import EncoderResolver  # it extends this file's class

    return (EncoderResolver if spec.is_encoder else Resolver)(config, spec, facts, draft)


class _Pace(TypedDict, total=False):
    """Fields of Settings that say how a GPU is kept busy."""

    min_free_slots_to_start: int
    full_step_tokens: int
    full_rate_seqs: int


@dataclass(frozen=True, slots=True)
class _Memory:
    allowed: int  # bytes that the engine may use
    for_steps: int  # bytes of `allowed` that steps need
    source: str  # where `allowed` comes from


class Resolver:
    """Decides in dependency order, and notes each value with its reason."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None) -> None:
        self._config = config
        self._spec = spec
        self._draft = draft
        self._ranks = RankLayout(config, spec, facts, on_gpu=False)  # until `_device` says so
        self._facts = facts
        self._choices: list[Choice] = []
        self._warnings: list[str] = []
        self._on_gpu = False  # until `_device` says so
        self._known_sizes: dict[int, WeightSizes] = {}  # by stage

    def settings(self) -> Settings:
        config = self._config
        device = self._device()
        self._ranks = RankLayout(config, self._spec, self._facts, on_gpu=self._on_gpu)
        self._ranks.decide(self._note, self._warnings.append)
        check_speculation(config, self._spec, self._draft, on_gpu=self._on_gpu)
        dtype = self._dtype()
        quantization = self._quantization(dtype)
        self._decide_adapters(dtype)
        kv_dtype = self._kv_dtype(dtype)
        threads = self._threads(dtype)
        weight_offload = self._weight_offload(dtype)
        max_seqs = config.max_num_seqs or self._max_seqs(dtype, kv_dtype)
        num_blocks = self._num_blocks(dtype, kv_dtype, max_seqs)
        max_num_seqs = self._max_num_seqs(num_blocks, max_seqs, dtype, kv_dtype)
        max_model_len = self._max_model_len(num_blocks)
        max_num_batched_tokens = self._max_num_batched_tokens(max_num_seqs, max_model_len)
        enable_prefix_caching = self._enable_prefix_caching(dtype, max_num_seqs)
        offload = self._offload(kv_dtype)
        self._warn_about_block_size()
        self._warn_about_memory_share()
        self._warn_about_slots(dtype, num_blocks, max_num_seqs, max_model_len)
        self._warn_about_offload(dtype, max_num_seqs)
        return Settings(
            device=device,
            dtype=dtype,
            quantization=quantization,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            enable_expert_parallel=config.enable_expert_parallel,
            nnodes=config.nnodes,
            cpu_offload_gb=weight_offload.cpu_offload_gb,
            cpu_offload_path=weight_offload.path,
            cpu_offload_host_bytes=weight_offload.host_bytes,
            kv_dtype=kv_dtype,
            attention_backend=self._attention_backend(dtype),
            load_format=config.load_format,
            num_threads=threads.num_threads,
            cpu_affinity=threads.cpu_affinity,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=num_blocks,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            has_recurrent_state=self._has_states,
            queue_policy=config.scheduling_policy,
            capacity_policy=config.capacity_policy,
            **self._pace(max_num_seqs),
            seed=config.seed,
            speculation=self._speculation(max_num_seqs, max_num_batched_tokens, max_model_len),
            kv_offload_gib=offload.host_gib,
            kv_offload_path=config.kv_offload_path,
            kv_offload_disk_gib=offload.disk_gib,
            num_host_blocks=offload.num_host_blocks,
            host_block_bytes=offload.host_block_bytes,
            adapters=self._adapters,
            choices=tuple(self._choices),
            warnings=tuple(self._warnings),
        )

    def _offload(self, kv_dtype: str) -> Offload:
        why_not = None if self._config.enable_prefix_caching else "enable_prefix_caching is off"
        if self._has_states:
            why_not = "layers of the model have a recurrent state, so none are cached"
        found = choose_offload(
            self._config,
            block_bytes=self._ranks.first_shards.spec.kv_elements_per_token
            * BYTES_OF[kv_dtype]
            * self._config.block_size,
            num_ranks=self._config.tensor_parallel_size * self._config.pipeline_parallel_size,
            num_local_ranks=self._ranks.num_local,
            why_not=why_not,
            note=self._note,
        )
        if found.num_host_blocks and not self._on_gpu and self._config.kv_offload_path is None:
            self._warnings.append(
                f"kv_offload_gib={found.host_gib:g}: on a CPU the KV cache is in host memory too; a larger "
                "kv_cache_memory_bytes does the same without copies; kv_offload_path adds a disk"
            )
        return found

    def _speculation(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Speculation | None:
        found = choose_speculation(
            self._config,
            self._spec,
            self._draft,
            on_gpu=self._on_gpu,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        if found is not None:
            drafts = f"up to {found.config.num_tokens} drafts of each of up to {found.max_seqs} decoding sequences"
            self._note("speculative_config", found.config.method, f"as set: {drafts}, as far as they are accepted")
        return found

    def _weight_offload(self, dtype: str) -> WeightOffload:
        if not self._config.cpu_offload_gb:
            return WeightOffload()
        if not self._on_gpu:
            self._note("cpu_offload_gb", "0", "on a CPU all weights are in host memory")
            return WeightOffload()
        found, streamed = choose_weight_offload(
            self._config,
            self._facts,
            self._streamed(dtype),
            layers=list(self._sizes(0, dtype).layers),
            num_local=self._ranks.num_local,
        )
        num_layers = self._ranks.first_shards.layers.size
        describe_offload(self._config, streamed, num_layers=num_layers, note=self._note)
        if streamed.disk_indexes:
            self._warnings.append(disk_warning(streamed))
        return found

    def _warn_about_offload(self, dtype: str, max_num_seqs: int) -> None:
        if self._on_gpu and self._config.cpu_offload_gb:
            warning = offload_warning(self._facts, self._streamed(dtype), max_num_seqs=max_num_seqs)
            self._warnings.append(warning)

    def refuse_more_than_memory(self, settings: Settings) -> None:
        gpu, config = self._facts.gpu, self._config
        total = gpu.total_memory if self._on_gpu and gpu is not None else self._facts.total_memory
        total //= self._ranks.num_per_device
        cache, weights = settings.num_blocks * self._block_bytes(settings.kv_dtype), self._weight_bytes(settings.dtype)
        weights += self._state_bytes(settings.dtype, settings.max_num_seqs)
        self._refuse_more_than_host_memory(settings)
        if cache + weights <= total:
            return
        name = "kv_cache_memory_bytes" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
        raise ConfigError(
            f"{name}={getattr(config, name):,} is a KV cache of {cache / GIB:,.1f} GiB; with weights of "
            f"{weights / GIB:,.1f} GiB it does not fit into {total / GIB:,.1f} GiB of memory; lower it or leave it out"
        )

    def _refuse_more_than_host_memory(self, settings: Settings) -> None:
        free, asked = self._facts.free_memory, int(settings.kv_offload_gib * GIB)
        if asked > free:
            raise ConfigError(
                f"kv_offload_gib={settings.kv_offload_gib:g} is more than the {free / GIB:.1f} GiB of host memory that "
                "are free; lower it, or use kv_offload_path for the rest"
            )

    @property
    def _adapters(self) -> AdapterLimits | None:
        config = self._config
        if not config.uses_adapters:
            return None
        max_loras = config.max_loras or max(DEFAULT_MAX_LORAS, len(config.adapter_paths))
        return AdapterLimits(max_loras=max_loras, max_rank=config.max_lora_rank)

    def _decide_adapters(self, dtype: str) -> None:
        limits = self._adapters
        if limits is None:
            if self._config.max_loras is not None:
                self._warnings.append(f"max_loras={self._config.max_loras} has no effect without enable_lora")
            return
        if (reason := why_not_adapted(self._spec)) is not None:
            raise ConfigError(f"enable_lora: {reason}; leave it out, or merge the adapter into the model")
        if self._ranks.num_ranks > 1:
            raise ConfigError(
                f"enable_lora with tensor_parallel_size={self._config.tensor_parallel_size} and "
                f"pipeline_parallel_size={self._config.pipeline_parallel_size}: adapters are not divided over ranks "
                "yet; use one rank, with data_parallel_size for more engines, or merge the adapter into the model"
            )
        if self._on_gpu and self._config.cpu_offload_gb:
            raise ConfigError(
                "enable_lora is not supported with cpu_offload_gb: layers that stream from host memory have no place "
                "for adapters yet; leave one of them out, or merge the adapter into the model"
            )
        size = adapter_bytes(self._spec, limits, BYTES_OF[dtype])
        given = "as set" if self._config.max_loras is not None else "adapters that may be loaded at once"
        self._note("max_loras", limits.max_loras, f"{given}: {size / MIB:,.0f} MiB for ranks up to {limits.max_rank}")

    @property
    def _has_states(self) -> bool:
        return self._spec.recurrent is not None

    def _enable_prefix_caching(self, dtype: str, max_num_seqs: int) -> bool:
        if not self._has_states:
            return self._config.enable_prefix_caching
        each = self._spec.state_bytes(BYTES_OF[dtype])
        self._note(
            "recurrent_states",
            f"{self._state_bytes(dtype, max_num_seqs) / MIB:,.1f} MiB",
            f"{max_num_seqs:,} slots of {each / MIB:,.1f} MiB",
        )
        if self._config.enable_prefix_caching:
            reason = "layers of the model have a recurrent state, which cached blocks of a prefix do not contain"
            self._note("enable_prefix_caching", "off", reason)
        return False

    def _state_bytes(self, dtype: str, max_num_seqs: int) -> int:
        num_padding = int(self._on_gpu)
        return (max_num_seqs + num_padding) * self._spec.state_bytes(BYTES_OF[dtype])

    def _seqs_with_states(self, dtype: str, max_seqs: int) -> int:
        """How many sequences' states fit into their share of the memory, up to `max_seqs`."""
        each = self._spec.state_bytes(BYTES_OF[dtype])
        if not each:
            return max_seqs
        memory = self._memory(max_seqs)
        free = memory.allowed - memory.for_steps - self._weight_bytes(dtype)
        share = STATE_SHARE if self._spec.num_attention_layers else STATE_SHARE_ALONE
        return max(1, min(max_seqs, int(free * share) // each))

    def _pace(self, max_num_seqs: int) -> _Pace:
        if not self._on_gpu:
            return {}
        return {
            "min_free_slots_to_start": max(1, max_num_seqs // GPU_START_FRACTION),
            "full_step_tokens": GPU_FULL_STEP_TOKENS,
            # Where tiles do not fill the processors, a step of this size is slower per sequence, but a long tail of
            # small steps is slower still: 512 at once were best for models of 1B and 3B too.
            "full_rate_seqs": min(max_num_seqs, GPU_MIN_FULL_RATE_SEQS),
        }

    def _note(self, name: str, value: object, reason: str) -> None:
        self._choices.append(Choice(name, f"{value:,}" if isinstance(value, int) else str(value), reason))

    def _device(self) -> str:
        gpu = self._facts.gpu
        if self._config.device == "cuda" and gpu is None:
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA GPU; use device='cpu' or 'auto'")
        if self._config.device == "cpu" or gpu is None:
            self._note("device", "cpu", self._facts.cpu_model)
            return "cpu"
        if gpu.capability < MIN_CAPABILITY:
            raise ConfigError(
                f"{gpu.name} has compute capability {_dotted(gpu.capability)}, and the kernels need "
                f"{_dotted(MIN_CAPABILITY)} (Ampere) or more; use device='cpu'"
            )
        self._on_gpu = True
        self._note("device", "cuda", gpu.name)
        return "cuda"

    def _dtype(self) -> str:
        if self._on_gpu:
            return self._gpu_dtype()
        if self._config.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self._config.dtype!r} is not supported on a CPU, which computes in float32")
        self._note("dtype", "float32", "what a CPU multiplies fastest, and exact for every checkpoint type")
        return "float32"

    def _gpu_dtype(self) -> str:
        if self._config.dtype == "float32":
            raise ConfigError("dtype='float32' is not supported on a GPU; use 'bfloat16' or 'float16'")
        if self._config.dtype != "auto":
            self._note("dtype", self._config.dtype, "as set")
            return self._config.dtype
        value = "float16" if self._spec.dtype == "float16" else "bfloat16"
        self._note("dtype", value, f"the checkpoint has {self._spec.dtype}")
        return value

    def _quantization(self, dtype: str) -> Quantization | None:
        given, stored = self._config.quantization, self._spec.quantization
        if given is not None and stored is not None and given != stored.kind:
            raise ConfigError(
                f"quantization={given!r} does not fit the checkpoint, whose weights are {stored.kind} "
                f"({stored.method}); leave it out"
            )
        if stored is not None:
            return self._stored_quantization(stored, dtype)
        if given is not None:
            self._check_quantization(given, dtype)
            self._note("quantization", given, f"as set: {_QUANTIZED[given]}")
        return given

    def _stored_quantization(self, stored: StoredQuantization, dtype: str) -> Quantization | None:
        """The form in which a quantized checkpoint's matrices are kept in memory."""
        if not self._stays_packed(stored):
            reason = "its activations are not quantized" if not stored.stays_packed else self._why_cpu_widens
            self._note("quantization", None, f"{stored.kind} weights ({stored.method}) are dequantized: {reason}")
            return None
        self._check_quantization(stored.kind, dtype)
        self._note("quantization", stored.kind, f"as stored ({stored.method}): {_QUANTIZED[stored.kind]}")
        return stored.kind

    def _check_quantization(self, kind: Quantization, dtype: str) -> None:
        if kind == "fp8":
            self._check_fp8("quantization='fp8'")
            if dtype != "bfloat16":
                raise ConfigError("quantization='fp8' computes in bfloat16; set dtype='bfloat16'")
        elif not self._on_gpu and (kind != "int8" or not self._facts.multiplies_int8):
            raise ConfigError(f"quantization={kind!r} needs a GPU: {self._why_cpu_widens}")

    @property
    def _why_cpu_widens(self) -> str:
        if self._facts.multiplies_int8:
            return "a CPU computes in float32 or INT8"
        return "this CPU computes in float32 (INT8 needs x86 with AVX2)"

    def _stays_packed(self, stored: StoredQuantization) -> bool:
        return stored.stays_packed_on("cuda" if self._on_gpu else "cpu") and (
            self._on_gpu or self._facts.multiplies_int8
        )

    def _kv_dtype(self, dtype: str) -> str:
        given = self._config.kv_cache_dtype
        if given == "auto":
            return dtype
        self._check_fp8(f"kv_cache_dtype={given!r}")
        self._note("kv_cache_dtype", "float8_e4m3fn", "as set: twice the tokens, half the bytes to read")
        return "float8_e4m3fn"

    def _attention_backend(self, dtype: str) -> str:
        chosen = choose_attention(
            self._config.attention_backend, self._spec, dtype, self._facts.gpu if self._on_gpu else None
        )
        if self._on_gpu:
            self._note("attention_backend", chosen.name, chosen.reason)
        return chosen.name

    def _check_fp8(self, what: str) -> None:
        gpu = self._facts.gpu
        if not self._on_gpu or gpu is None:
            raise ConfigError(f"{what} needs a GPU; a CPU computes in float32")
        if gpu.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{what} needs a GPU of compute capability {_dotted(FP8_CAPABILITY)} or more, and {gpu.name} has "
                f"{_dotted(gpu.capability)}"
            )

    def _threads(self, dtype: str) -> Threads:
        given, num_cores = self._config.num_threads, self._facts.num_cores
        if given is not None:
            if given > MAX_THREADS_PER_CORE * num_cores:
                raise ConfigError(
                    f"num_threads={given:,} is more than {MAX_THREADS_PER_CORE} for each of the {num_cores} cores that "
                    "this process may use; leave it out to use all cores"
                )
            if given > num_cores and not self._on_gpu:
                self._warnings.append(
                    f"num_threads={given} is more than the {num_cores} cores that this process may use: threads wait "
                    f"for each other in every step; set {num_cores} or less"
                )
        num_ranks = self._ranks.num_local
        weight_bytes = self._weight_bytes(dtype) * (1 if self._on_gpu else num_ranks)
        threads = choose_threads(self._config, self._facts, on_gpu=self._on_gpu, weight_bytes=weight_bytes)
        shared = f", {max(1, threads.num_threads // num_ranks)} for each of {num_ranks} ranks" * (num_ranks > 1)
        self._note("num_threads", threads.num_threads, threads.reason + shared)
        if self._facts.topology is not None:
            self._note("cpu_affinity", threads.cpu_affinity, threads.affinity_reason)
        return threads

    def _max_seqs(self, dtype: str, kv_dtype: str) -> int:
        """The maximum before the size of the KV cache is considered."""
        return self._seqs_with_states(dtype, self._max_seqs_by_rate(dtype, kv_dtype))

    def _max_seqs_by_rate(self, dtype: str, kv_dtype: str) -> int:
        if not self._on_gpu:
            return CPU_FULL_RATE_SEQS
        with_states = self._seqs_with_states(dtype, GPU_MAX_SEQS)
        num_blocks = self._num_blocks_as_set(kv_dtype) or self._room(dtype, kv_dtype, with_states)
        if num_blocks * self._config.block_size >= GPU_MAX_SEQS * GPU_USUAL_TOKENS:
            return GPU_MAX_SEQS
        return min(GPU_MAX_SEQS, self._full_rate_seqs())

    def _full_rate_seqs(self) -> int:
        return max(GPU_MIN_FULL_RATE_SEQS, -(-GPU_TILE_AREA // self._spec.hidden_size // 64) * 64)

    def _max_num_seqs(self, num_blocks: int, max_seqs: int, dtype: str, kv_dtype: str) -> int:
        given = self._config.max_num_seqs
        if given is not None:
            self._note("max_num_seqs", given, "as set")
            return given
        device = "GPU" if self._on_gpu else "CPU"
        full_rate = f"a {device} reaches its full rate with this many sequences; more would mostly use memory"
        in_cache = max(1, num_blocks * self._config.block_size // MIN_SEQ_TOKENS)
        if self._has_states and max_seqs < self._max_seqs_by_rate(dtype, kv_dtype):
            full_rate = "the recurrent states of more would take too much of the memory"
        limits = [
            (max_seqs, full_rate),
            (in_cache, f"the KV cache holds this many sequences of {MIN_SEQ_TOKENS} tokens"),
            (
                self._config.max_num_batched_tokens or in_cache,
                "max_num_batched_tokens: each running sequence needs one token a step",
            ),
        ]
        value, reason = min(limits, key=lambda limit: limit[0])
        self._note("max_num_seqs", value, reason)
        return value

    def _num_blocks(self, dtype: str, kv_dtype: str, max_num_seqs: int) -> int:
        config, num_blocks = self._config, self._num_blocks_as_set(kv_dtype)
        if num_blocks is None:
            return self._num_blocks_in_memory(dtype, kv_dtype, max_num_seqs)
        if config.kv_cache_memory_bytes is None or config.num_gpu_blocks_override is not None:
            self._note("num_blocks", num_blocks, "as set by num_gpu_blocks_override")
        else:
            self._note("num_blocks", num_blocks, f"as set: {config.kv_cache_memory_bytes / GIB:.2f} GiB of KV cache")
        return num_blocks

    def _num_blocks_as_set(self, kv_dtype: str) -> int | None:
        config = self._config
        if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is None:
            return config.num_gpu_blocks_override
        block_bytes = self._block_bytes(kv_dtype)
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

    def _room(self, dtype: str, kv_dtype: str, max_num_seqs: int) -> int:
        """Blocks that fit beside the weights and the steps of `max_num_seqs` sequences; may be less than one."""
        memory = self._memory(max_num_seqs)
        taken = self._weight_bytes(dtype) + memory.for_steps + self._state_bytes(dtype, max_num_seqs)
        block_bytes = self._block_bytes(kv_dtype)
        if not block_bytes:  # no attention: blocks are only counted
            return self._max_blocks(max_num_seqs) if taken <= memory.allowed else 0
        return (memory.allowed - taken) // block_bytes

    def _max_blocks(self, max_num_seqs: int) -> int:
        """Those of `max_num_seqs` whole contexts."""
        context = self._config.max_model_len or self._spec.max_model_len
        return max_num_seqs * -(-context // self._config.block_size)

    def _memory(self, max_num_seqs: int) -> _Memory:
        return self._gpu_memory(max_num_seqs) if self._on_gpu else self._cpu_memory()

    def _num_blocks_in_memory(self, dtype: str, kv_dtype: str, max_num_seqs: int) -> int:
        memory, weights = self._memory(max_num_seqs), self._weight_bytes(dtype)
        room = self._room(dtype, kv_dtype, max_num_seqs)
        if room < 1:
            states = self._state_bytes(dtype, max_num_seqs)
            of_states = f", recurrent states of {states / GIB:.2f} GiB ({max_num_seqs} slots)" if states else ""
            lower = "max_num_batched_tokens or max_num_seqs" if states else "max_num_batched_tokens"
            raise ConfigError(
                f"weights of {weights / GIB:.2f} GiB as {self._kind_in_memory or dtype}{of_states} and steps of "
                f"{memory.for_steps / GIB:.2f} GiB leave no room for a KV cache: {memory.allowed / GIB:.2f} GiB may be "
                f"used ({memory.source}); raise gpu_memory_utilization, free memory, lower {lower}, or "
                "take a smaller model"
            )
        context = self._config.max_model_len or self._spec.max_model_len
        max_blocks = self._max_blocks(max_num_seqs)
        if max_blocks <= room:
            reason = f"{max_num_seqs} sequences of {context:,} tokens: more is never needed"
            self._note("num_blocks", max_blocks, reason)
            return max_blocks
        less = f"{weights / GIB:.2f} GiB of weights"
        if self._has_states:
            less += f", {self._state_bytes(dtype, max_num_seqs) / GIB:.2f} GiB of recurrent states"
        if memory.for_steps:
            less += f" and {memory.for_steps / GIB:.2f} GiB for steps"
        self._note(
            "num_blocks", room, f"{room * self._block_bytes(kv_dtype) / GIB:.2f} GiB: {memory.source}, less {less}"
        )
        return room

    def _cpu_memory(self) -> _Memory:
        share, free = self._config.gpu_memory_utilization or CPU_MEMORY_SHARE, self._facts.free_memory
        source = f"{share:.0%} of {free / GIB:.1f} GiB free memory{self._over_ranks}, taken as it is used"
        return _Memory(int(free * share) // self._ranks.num_per_device, 0, source)

    @property
    def _over_ranks(self) -> str:
        return f", over {self._ranks.num_per_device} ranks" if self._ranks.num_per_device > 1 else ""

    def _gpu_memory(self, max_num_seqs: int) -> _Memory:
        """The share is of the whole GPU, so that the shares of several engines add up; others' memory counts."""
        gpu = self._facts.gpu
        assert gpu is not None
        share = self._config.gpu_memory_utilization or GPU_MEMORY_SHARE
        allowed = min(int(gpu.total_memory * share), gpu.free_memory)
        source = f"{share:.0%} of {gpu.total_memory / GIB:.1f} GiB"
        if allowed == gpu.free_memory:
            source = f"the {allowed / GIB:.1f} GiB that other processes have left"
        allowed, source = allowed // self._ranks.num_per_device, source + self._over_ranks
        for_steps = self._step_memory(max_num_seqs) if gpu.step_memory is None else gpu.step_memory
        return _Memory(allowed, for_steps + GPU_RUNTIME_BYTES, source)

    def _warn_about_block_size(self) -> None:
        size = self._config.block_size
        if size < CPU_MIN_BLOCK_SIZE and not self._on_gpu:
            self._warnings.append(
                f"block_size={size} is less than the {CPU_MIN_BLOCK_SIZE} keys that a CPU reads at once: attention "
                "copies them first; 16 is the default"
            )

    def _warn_about_memory_share(self) -> None:
        config, gpu = self._config, self._facts.gpu
        share = config.gpu_memory_utilization
        if share is None:
            return
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(config, name) is not None:
                self._warnings.append(
                    f"gpu_memory_utilization={share:g} has no effect: {name} sets the size of the KV cache; leave out "
                    "one of them"
                )
                return
        if share <= MAX_MEMORY_SHARE:
            return
        if self._on_gpu and gpu is not None:
            left, default = (1 - share) * gpu.total_memory, GPU_MEMORY_SHARE
            needs = (
                f"of {gpu.total_memory / GIB:.1f} GiB for the CUDA context, fragments and peaks that were not measured"
            )
        else:
            left, default = (1 - share) * self._facts.free_memory, CPU_MEMORY_SHARE
            needs = f"of {self._facts.free_memory / GIB:.1f} GiB free memory for everything else on this machine"
        self._warnings.append(
            f"gpu_memory_utilization={share:g} leaves {left / GIB:.1f} GiB {needs}; a step that needs more ends "
            f"all requests; lower it to {MAX_MEMORY_SHARE:g} or less (default: {default:g})"
        )

    def _warn_about_slots(self, dtype: str, num_blocks: int, max_num_seqs: int, max_model_len: int) -> None:
        """Slots that the KV cache cannot fill, or whose own memory is large. Only a value that was set can be."""
        if self._config.max_num_seqs is None:
            return
        in_cache = num_blocks * self._config.block_size // MIN_SEQ_TOKENS
        if max_num_seqs > max(1, in_cache):
            self._warnings.append(
                f"max_num_seqs={max_num_seqs:,} is more than the KV cache holds: {in_cache:,} sequences of "
                f"{MIN_SEQ_TOKENS} tokens; the others wait or are preempted; set {max(1, in_cache):,} or less, or a "
                "larger cache"
            )
        allowed = max(1, self._memory(max_num_seqs).allowed)
        # Two sets of logits, one row of token ids, and block numbers.
        each = (
            2 * BYTES_OF[dtype] * self._spec.vocab_size
            + 4 * max_model_len
            + 4 * max_model_len // self._config.block_size
        )
        if max_num_seqs * each > MAX_SLOT_SHARE * allowed:
            self._warnings.append(
                f"max_num_seqs={max_num_seqs:,} takes {max_num_seqs * each / GIB:.1f} GiB for logits and tables of its "
                f"slots, {max_num_seqs * each / allowed:.0%} of the memory that may be used; lower it, or max_model_len"
            )

    def _step_memory(self, max_num_seqs: int) -> int:
        """A first estimate, before a step is measured: the widest activations and two sets of logits."""
        spec, num_tokens = self._ranks.first_shards.spec, self._config.max_num_batched_tokens or GPU_BATCHED_TOKENS
        activations = num_tokens * (3 * spec.mlp_width + 4 * spec.hidden_size + spec.attention_activations)
        return 2 * (activations + 2 * max_num_seqs * spec.vocab_size)

    def _weight_bytes(self, dtype: str) -> int:
        """The weights of the rank with the most: the first stage also has the embeddings, the last one the head."""
        draft = self._draft
        of_draft = 0 if draft is None else self._ranks.shards_of_draft(draft).num_params * BYTES_OF[dtype]
        of_adapters = 0 if self._adapters is None else adapter_bytes(self._spec, self._adapters, BYTES_OF[dtype])
        stages = self._ranks.end_stages
        weights = max(gpu_bytes(self._sizes(stage, dtype), self._streamed(dtype, stage)) for stage in stages)
        return weights + of_draft + of_adapters

    def _streamed(self, dtype: str, stage: int = 0) -> StreamedLayers:
        """The layers of a stage that stream from host memory. The first stage has the most."""
        return streamed_layers(self._sizes(stage, dtype), self._config.cpu_offload_gb if self._on_gpu else 0.0)

    def _sizes(self, stage: int, dtype: str) -> WeightSizes:
        if stage not in self._known_sizes:  # a mixture has thousands of tensors
            shards, kind = self._ranks.shards_of(stage), self._kind_in_memory
            self._known_sizes[stage] = sizes_of(shards, element_bytes=BYTES_OF[dtype], kind=kind)
        return self._known_sizes[stage]

    @property
    def _kind_in_memory(self) -> Quantization | None:
        stored = self._spec.quantization
        if stored is None:
            return self._config.quantization
        return stored.kind if self._stays_packed(stored) else None

    def _block_bytes(self, dtype: str) -> int:
        of_draft = 0 if self._draft is None else self._ranks.shards_of_draft(self._draft).spec.kv_elements_per_token
        num_elements = self._ranks.first_shards.spec.kv_elements_per_token + of_draft
        return num_elements * BYTES_OF[dtype] * self._config.block_size

    def _max_model_len(self, num_blocks: int) -> int:
        given, own = self._config.max_model_len, self._spec.max_model_len
        in_cache = num_blocks * self._config.block_size + 1  # the last token's keys and values are never needed
        if given is not None:
            if given > own:
                raise ConfigError(f"max_model_len={given:,} is more than the model's own context of {own:,} tokens")
            if given > in_cache:
                raise ConfigError(
                    f"max_model_len={given:,} needs {given - 1:,} tokens of KV cache, and there is room for "
                    f"{in_cache - 1:,}; lower it or raise gpu_memory_utilization or kv_cache_memory_bytes"
                )
            self._note("max_model_len", given, "as set")
            return given
        value = min(own, in_cache)
        self._note("max_model_len", value, "the model's own context" if value == own else "what the KV cache can hold")
        return value

    def _max_num_batched_tokens(self, max_num_seqs: int, max_model_len: int) -> int:
        given = self._config.max_num_batched_tokens
        minimum, why = max_num_seqs, f"max_num_seqs={max_num_seqs}: each running sequence needs one token a step"
        if not self._config.enable_chunked_prefill and max_model_len > minimum:
            minimum = max_model_len
            why = f"max_model_len={max_model_len}: without chunked prefill a prompt must fit in one step"
        if given is not None:
            if given < minimum:
                raise ConfigError(f"max_num_batched_tokens={given} must be at least {why}")
            self._note("max_num_batched_tokens", given, "as set")
            return given
        value = GPU_BATCHED_TOKENS if self._on_gpu else CPU_BATCHED_TOKENS
        if minimum > value:
            self._note("max_num_batched_tokens", minimum, why)
            return minimum
        self._note("max_num_batched_tokens", value, "full rate for prompts, and steps short enough for streams")
        return value


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
