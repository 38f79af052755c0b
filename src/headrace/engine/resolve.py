"""From what the user set, the model and the machine to settings: one function, and a reason for each value."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.settings import Choice, Settings
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.models.spec import ModelSpec

GIB = 2**30
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

# On a CPU a step reads all weights from memory; with this many rows that is a small part of its time.
CPU_FULL_RATE_SEQS = 128
CPU_BATCHED_TOKENS = 512
CPU_MEMORY_SHARE = 0.5


def resolve(config: EngineConfig, spec: ModelSpec, facts: MachineFacts) -> Settings:
    return _Resolver(config, spec, facts).settings()


class _Resolver:
    """Decides in dependency order; each `_decide` notes the value with its reason."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, facts: MachineFacts) -> None:
        self._config = config
        self._spec = spec
        self._facts = facts
        self._choices: list[Choice] = []

    def settings(self) -> Settings:
        config = self._config
        device = self._device()
        dtype = self._dtype()
        num_threads = self._num_threads()
        max_num_seqs = self._max_num_seqs()
        num_blocks = self._num_blocks(dtype, max_num_seqs)
        max_model_len = self._max_model_len(num_blocks)
        return Settings(
            device=device,
            dtype=dtype,
            load_format=config.load_format,
            num_threads=num_threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens(max_num_seqs, max_model_len),
            block_size=config.block_size,
            num_blocks=num_blocks,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
            queue_policy=config.scheduling_policy,
            capacity_policy=config.capacity_policy,
            seed=config.seed,
            choices=tuple(self._choices),
        )

    def _note(self, name: str, value: object, reason: str) -> None:
        self._choices.append(Choice(name, f"{value:,}" if isinstance(value, int) else str(value), reason))

    def _device(self) -> str:
        if self._config.device == "cuda":
            raise ConfigError("device='cuda' is not supported by this version; use device='cpu'")
        self._note("device", "cpu", self._facts.cpu_model)
        return "cpu"

    def _dtype(self) -> str:
        if self._config.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self._config.dtype!r} is not supported on a CPU, which computes in float32")
        self._note("dtype", "float32", "what a CPU multiplies fastest, and exact for every checkpoint type")
        return "float32"

    def _num_threads(self) -> int:
        if self._config.num_threads is not None:
            self._note("num_threads", self._config.num_threads, "as set")
            return self._config.num_threads
        self._note("num_threads", self._facts.num_cores, "all cores that this process may use")
        return self._facts.num_cores

    def _max_num_seqs(self) -> int:
        given = self._config.max_num_seqs
        if given is not None:
            self._note("max_num_seqs", given, "as set")
            return given
        value = CPU_FULL_RATE_SEQS
        limit = self._config.max_num_batched_tokens
        if limit is not None and limit < value:
            self._note("max_num_seqs", limit, "max_num_batched_tokens: each running sequence needs one token a step")
            return limit
        self._note(
            "max_num_seqs",
            value,
            "a CPU multiplies at nearly its full rate with so many rows; more would mostly use memory",
        )
        return value

    def _num_blocks(self, dtype: str, max_num_seqs: int) -> int:
        config, block_bytes = self._config, self._block_bytes(dtype)
        if config.num_gpu_blocks_override is not None:
            self._note("num_blocks", config.num_gpu_blocks_override, "as set by num_gpu_blocks_override")
            return config.num_gpu_blocks_override
        if config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // block_bytes
            if num_blocks < 1:
                raise ConfigError(
                    f"kv_cache_memory_bytes={config.kv_cache_memory_bytes:,} is less than one block of "
                    f"{config.block_size} tokens, which takes {block_bytes:,} bytes"
                )
            self._note("num_blocks", num_blocks, f"as set: {config.kv_cache_memory_bytes / GIB:.2f} GiB of KV cache")
            return num_blocks
        return self._num_blocks_in_memory(dtype, block_bytes, max_num_seqs)

    def _num_blocks_in_memory(self, dtype: str, block_bytes: int, max_num_seqs: int) -> int:
        share = self._config.gpu_memory_utilization or CPU_MEMORY_SHARE
        allowed = int(self._facts.free_memory * share)
        weights = self._spec.num_params * BYTES_OF[dtype]
        room = (allowed - weights) // block_bytes
        if room < 1:
            raise ConfigError(
                f"the weights take {weights / GIB:.2f} GiB as {dtype}, but only {allowed / GIB:.2f} GiB may be used "
                f"({share:.0%} of {self._facts.free_memory / GIB:.2f} GiB free); "
                "raise gpu_memory_utilization, free memory, or take a smaller model"
            )
        context = self._config.max_model_len or self._spec.max_model_len
        most = max_num_seqs * -(-context // self._config.block_size)
        if most <= room:
            self._note("num_blocks", most, f"{max_num_seqs} sequences of {context:,} tokens: more is never needed")
            return most
        self._note(
            "num_blocks",
            room,
            f"{room * block_bytes / GIB:.2f} GiB: {share:.0%} of {self._facts.free_memory / GIB:.1f} GiB free memory, "
            f"less {weights / GIB:.2f} GiB of weights; taken only as it is used",
        )
        return room

    def _block_bytes(self, dtype: str) -> int:
        return self._spec.kv_elements_per_token * BYTES_OF[dtype] * self._config.block_size

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
        least, why = max_num_seqs, f"max_num_seqs={max_num_seqs}: each running sequence needs one token a step"
        if not self._config.enable_chunked_prefill and max_model_len > least:
            least, why = max_model_len, f"max_model_len={max_model_len}: without chunks a prompt must fit in one step"
        if given is not None:
            if given < least:
                raise ConfigError(f"max_num_batched_tokens={given} must be at least {why}")
            self._note("max_num_batched_tokens", given, "as set")
            return given
        if least > CPU_BATCHED_TOKENS:
            self._note("max_num_batched_tokens", least, why)
            return least
        self._note(
            "max_num_batched_tokens", CPU_BATCHED_TOKENS, "full rate for prompts, and steps short enough for streams"
        )
        return CPU_BATCHED_TOKENS
