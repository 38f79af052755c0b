"""The user's settings. `None` means: chosen by `engine.resolve`, which also gives the reason.

Command-line flags are generated from these fields, including their help texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import NoneType
from typing import Any, Literal, TypedDict, get_args

from headrace.adapters import DEFAULT_MAX_RANK, MAX_LORAS, MAX_RANK, adapter_paths
from headrace.arguments import refuses_unknown
from headrace.errors import ConfigError
from headrace.other_settings import explanation
from headrace.speculation import SpeculativeConfig, speculative_config
from headrace.types import MAX_SEED

EMBEDDED_MODEL = "smollm2"

# Kernels find a token's block with shifts. Half of a sequence's last block is empty on average, and prefixes are shared
# in whole blocks, so large ones waste more.
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_ENGINES = 256  # of one job or server on one machine
MAX_PORT = 65_535
MAX_OFFLOAD_GB = 1 << 20
MAX_NUM_SEQS = 16_384  # sequences in a step: each has a row of logits and a row of token ids, used or not

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "random"]
Device = Literal["auto", "cpu", "cuda"]
QueuePolicy = Literal["fcfs", "priority"]
Quantization = Literal["fp8", "int8", "int4"]
KvCacheDType = Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"]
ExecutorBackend = Literal["mp", "ray"]
AttentionBackend = Literal["auto", "FLASH_ATTN", "TRITON_ATTN"]
ModelRunner = Literal["auto", "generate", "pooling"]
Conversion = Literal["auto", "none", "embed", "classify"]
CapacityPolicy = Literal["max_utilization", "guaranteed_no_evict", "static_batch"]


def setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@refuses_unknown(ConfigError, explain=explanation)
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The user's settings of one engine, under vLLM's names."""

    model: str = setting(
        EMBEDDED_MODEL, "a model directory, a GGUF file, a hub id, or 'smollm2', which needs no account"
    )
    tokenizer: str | None = setting(None, "a tokenizer directory or file; default: the model's own")
    chat_template: str | None = setting(
        None, "a file with a chat template, or its text, instead of the model's; default: the model's own"
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = setting(
        None, 'variables of the chat template, which requests may override, such as {"enable_thinking": false}'
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    runner: ModelRunner = setting(
        "auto",
        "what the model is for: 'generate' text, or 'pooling' (embeddings, scores, classes); default: its config",
    )
    convert: Conversion = setting("auto", "'embed': use a model that generates for embeddings; default: its config")
    pooler_config: Mapping[str, Any] | None = setting(
        None, 'how a pooling model pools, such as {"pooling_type": "MEAN", "normalize": false}; default: its own files'
    )
    hf_overrides: Mapping[str, Any] | None = setting(
        None, 'keys that replace those of config.json, such as {"is_matryoshka": true}; default: none'
    )
    load_format: LoadFormat = setting("auto", "where weights come from; 'random' needs only a config.json")
    dtype: DType = setting("auto", "type of the weights and activations")
    quantization: Quantization | None = setting(
        None,
        "quantizes the layers' weights at load: 'fp8' (GPU) and 'int8' (GPU and CPU) with activations of eight bits, "
        "'int4' weights alone (GPU and CPU); default: as the checkpoint stores them",
    )
    kv_cache_dtype: KvCacheDType = setting(
        "auto",
        "type of keys and values in the cache; 'fp8' holds twice as many tokens as 16 bits; default: that of the "
        "activations, on a CPU with packed or quantized weights float16",
    )
    attention_backend: AttentionBackend = setting(
        "auto", "kernels of attention on a GPU: FLASH_ATTN (FlashAttention-3 for prefills) or TRITON_ATTN (own ones)"
    )
    device: Device = setting("auto", "where the model runs")
    tensor_parallel_size: int = setting(1, "processes that share one copy of the model, one per GPU")
    pipeline_parallel_size: int = setting(1, "stages with consecutive layers of the model; each has its own processes")
    enable_expert_parallel: bool = setting(
        False, "the processes of tensor_parallel_size divide the experts of a mixture, not the matrices of each"
    )
    disable_custom_all_reduce: bool = setting(
        False, "small sums over GPUs go over NCCL like large ones, not through memory that the processes share"
    )
    nnodes: int = setting(1, "machines that share one copy of the model, each with an equal part of its processes")
    node_rank: int = setting(0, "which of these machines this is; 0 has the scheduler, others only host processes")
    master_addr: str = setting("127.0.0.1", "address of node 0, on which the other nodes join it")
    master_port: int = setting(29501, "port of node 0, on which the other nodes join it")
    distributed_executor_backend: ExecutorBackend = setting(
        "mp", "what starts the processes of other nodes: 'mp', a command on each node, or 'ray', a Ray cluster"
    )
    max_model_len: int | None = setting(None, "longest prompt plus answer, in tokens; default: the model's own")
    max_num_seqs: int | None = setting(None, "maximum sequences in one step; default: from model and memory")
    max_num_batched_tokens: int | None = setting(None, "maximum tokens in one step; default: from model and device")
    enable_chunked_prefill: bool = setting(True, "split long prompts into chunks that share steps with decoding")
    enable_prefix_caching: bool = setting(True, "keep and reuse the KV cache of prompts that share a prefix")
    block_size: int = setting(16, "tokens in one block of the KV cache")
    gpu_memory_utilization: float | None = setting(
        None, "share of the device's memory that the engine may use, weights included (on a CPU: of free memory)"
    )
    cpu_offload_gb: float = setting(
        0.0, "GiB that the GPU holds less of the layers' weights, which stream from host memory in every step"
    )
    cpu_offload_path: str | None = setting(
        None, "a directory on a local disk for streamed weights that do not fit in host memory; default: none"
    )
    kv_cache_memory_bytes: int | None = setting(None, "size of the KV cache in bytes; default: from free memory")
    num_gpu_blocks_override: int | None = setting(None, "number of KV-cache blocks, instead of sizing by memory")
    kv_offload_gib: float | None = setting(
        None, "host memory for cached prefixes that are evicted, in GiB; default: none (4 with kv_offload_path)"
    )
    kv_offload_path: str | None = setting(
        None, "a directory for them on a local disk, where they survive a restart; default: none"
    )
    kv_offload_disk_gib: float | None = setting(
        None, "size limit of kv_offload_path in GiB, old blocks are deleted; default: 64"
    )
    scheduling_policy: QueuePolicy = setting("fcfs", "order of waiting requests; 'priority': lower numbers first")
    capacity_policy: CapacityPolicy = setting(
        "max_utilization",
        "start what fits now and preempt if need be, or ('guaranteed_no_evict') only what can finish, "
        "or ('static_batch') that only when all others have finished",
    )
    num_threads: int | None = setting(None, "CPU threads for the model; default: the physical cores of one socket")
    cpu_affinity: str = setting(
        "auto",
        "CPUs of the engine's threads: a list such as 0-7,16; 'auto': from the machine's topology; 'none': not pinned",
    )
    seed: int = setting(0, "seed of random weights and of requests that bring none")
    speculative_config: Mapping[str, Any] | None = setting(
        None,
        "speculative decoding, with vLLM's keys: method (ngram, draft_model, early_exit), model, "
        "num_speculative_tokens, prompt_lookup_min, prompt_lookup_max, num_layers; default: none",
    )
    speculative_model: str | None = setting(
        None, "a smaller model with the same tokenizer that drafts tokens, or '[ngram]'; default: none"
    )
    num_speculative_tokens: int | None = setting(
        None, "most drafted tokens of a sequence in one step; 0: no speculative decoding; default: 4 if it is on"
    )

    enable_lora: bool = setting(
        False, "make room for LoRA adapters, which requests then use by name (default: on if lora_modules has any)"
    )
    lora_modules: Mapping[str, Any] | str | Sequence[Any] | None = setting(
        None, 'adapters to load at the start: name=path, or JSON such as {"name": "sql", "path": "..."}; default: none'
    )
    max_loras: int | None = setting(
        None, "adapters on the device at once; others wait in host memory; default: 4, or as many as lora_modules has"
    )
    max_lora_rank: int = setting(DEFAULT_MAX_RANK, "largest rank of an adapter")

    @property
    def adapter_paths(self) -> dict[str, str]:
        """`lora_modules` as directories by name."""
        return adapter_paths(self.lora_modules)

    @property
    def uses_adapters(self) -> bool:
        return self.enable_lora or bool(self.adapter_paths)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The three settings of speculative decoding in one; None if it is off."""
        return speculative_config(self.speculative_config, self.speculative_model, self.num_speculative_tokens)

    def __post_init__(self) -> None:
        self._check_names_and_flags()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        self._check_ranges()
        self._check_nodes()
        self._check_offload()
        _ = self.speculative  # raises an error for a value that is not valid
        self._check_adapters()
        if self.quantization not in (None, *get_args(Quantization)):
            raise ConfigError(
                f"quantization must be one of {', '.join(get_args(Quantization))}, got {self.quantization!r}; a "
                "quantized checkpoint needs none: its config.json says how it is quantized"
            )
        share = self.gpu_memory_utilization
        if share is not None and not (isinstance(share, (int, float)) and 0.0 < share <= 1.0):
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
        offload = self.cpu_offload_gb
        if isinstance(offload, bool) or not isinstance(offload, (int, float)) or not 0 <= offload < MAX_OFFLOAD_GB:
            raise ConfigError(
                f"cpu_offload_gb must be a number of GiB from 0 up to {MAX_OFFLOAD_GB:,}, got {offload!r}"
            )

    def _check_ranges(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ConfigError(
                f"block_size={self.block_size} is not one of {sizes}: kernels are made for powers of two; 16 is the "
                "default"
            )
        if self.max_num_seqs is not None and self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs:,} is more than {MAX_NUM_SEQS:,}: each sequence needs a row of "
                "logits and of token ids, used or not; leave it out to have it chosen from model and memory"
            )

    def _check_offload(self) -> None:
        for name in ("kv_offload_path", "cpu_offload_path"):
            path = getattr(self, name)
            if not isinstance(path, (str, NoneType)) or path == "":
                raise ConfigError(f"{name} must be a directory, got {path!r}")
        if self.cpu_offload_path is not None and not self.cpu_offload_gb:
            raise ConfigError("cpu_offload_path is for a part of cpu_offload_gb, which is not set; set both")
        for name in ("kv_offload_gib", "kv_offload_disk_gib"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < float("inf")):
                raise ConfigError(f"{name} must be a number of GiB, got {value!r}")
        if self.kv_offload_disk_gib is not None and self.kv_offload_path is None:
            raise ConfigError("kv_offload_disk_gib limits the size of kv_offload_path, which is not set; set both")
        if self.kv_offload_path is not None and 0 in (self.kv_offload_gib, self.kv_offload_disk_gib):
            raise ConfigError("kv_offload_path needs a size above 0, on disk and in host memory; or leave it out")

    def _check_adapters(self) -> None:
        for name, largest in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_RANK)):
            if (value := getattr(self, name)) is not None and value > largest:
                raise ConfigError(f"{name} must be at most {largest}, got {value}")
        _ = self.adapter_paths  # raises an error for a value that is not valid

    def _check_nodes(self) -> None:
        for name, end in (("node_rank", self.nnodes), ("master_port", MAX_PORT + 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
                raise ConfigError(f"{name} must be an integer from 0 to {end - 1}, got {value!r}")
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ConfigError(f"master_addr must be the name or address of node 0, got {self.master_addr!r}")

    def _check_names_and_flags(self) -> None:
        if not isinstance(self.cpu_affinity, str) or not _AFFINITY.fullmatch(self.cpu_affinity):
            raise ConfigError(
                f"cpu_affinity must be 'auto', 'none' or a list of CPUs such as '0-7,16', got {self.cpu_affinity!r}"
            )
        if not isinstance(self.model, (str, PathLike)):
            raise ConfigError(f"model must be text or a path, got {self.model!r}")
        if not isinstance(self.tokenizer, (str, PathLike, NoneType)):
            raise ConfigError(f"tokenizer must be text or a path, got {self.tokenizer!r}")
        for name in ("revision", "chat_template"):
            if not isinstance(value := getattr(self, name), (str, NoneType)):
                raise ConfigError(f"{name} must be text, got {value!r}")
        for name in ("default_chat_template_kwargs", "pooler_config", "hf_overrides"):
            if not isinstance(value := getattr(self, name), (Mapping, NoneType)):
                raise ConfigError(f"{name} must be an object, got {value!r}")
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed must be an integer between 0 and {MAX_SEED}, got {self.seed!r}")


_FLAGS = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_expert_parallel",
    "disable_custom_all_reduce",
    "enable_lora",
)
_AFFINITY = re.compile(r"auto|none|\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*")


class EngineOptions(TypedDict, total=False):
    """The same fields except `model`, for editors and type checkers: the keyword arguments of `LLM` and
    `AsyncEngine`."""

    tokenizer: str | None
    chat_template: str | None
    default_chat_template_kwargs: Mapping[str, Any] | None
    revision: str | None
    runner: ModelRunner
    convert: Conversion
    pooler_config: Mapping[str, Any] | None
    hf_overrides: Mapping[str, Any] | None
    load_format: LoadFormat
    dtype: DType
    quantization: Quantization | None
    kv_cache_dtype: KvCacheDType
    attention_backend: AttentionBackend
    device: Device
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    disable_custom_all_reduce: bool
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    distributed_executor_backend: ExecutorBackend
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    block_size: int
    gpu_memory_utilization: float | None
    cpu_offload_gb: float
    cpu_offload_path: str | None
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    kv_offload_gib: float | None
    kv_offload_path: str | None
    kv_offload_disk_gib: float | None
    scheduling_policy: QueuePolicy
    capacity_policy: CapacityPolicy
    num_threads: int | None
    cpu_affinity: str
    seed: int
    speculative_config: Mapping[str, Any] | None
    speculative_model: str | None
    num_speculative_tokens: int | None
    enable_lora: bool
    lora_modules: Mapping[str, Any] | str | Sequence[Any] | None
    max_loras: int | None
    max_lora_rank: int


_CHOICES: dict[str, tuple[str, ...]] = {
    "runner": get_args(ModelRunner),
    "convert": get_args(Conversion),
    "load_format": get_args(LoadFormat),
    "dtype": get_args(DType),
    "kv_cache_dtype": get_args(KvCacheDType),
    "attention_backend": get_args(AttentionBackend),
    "device": get_args(Device),
    "distributed_executor_backend": get_args(ExecutorBackend),
    "scheduling_policy": get_args(QueuePolicy),
    "capacity_policy": get_args(CapacityPolicy),
}
_AT_LEAST_ONE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "nnodes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "num_threads",
    "max_loras",
    "max_lora_rank",
)
