"""The settings of an encoder: there is no KV cache, and every prompt is computed whole, in one step."""

from __future__ import annotations

from headrace.engine.memory_budget import GIB, MemoryBudget
from headrace.engine.resolver import GPU_MAX_SEQS, Resolver
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models.adapter_spec import why_not_adapted

CPU_MAX_TEXTS = 128
CPU_BATCHED_TEXT_TOKENS = 2048
GPU_BATCHED_TEXT_TOKENS = 16384  # the host launches a step of a small encoder in about the time that these take

_NOT_FOR_ENCODERS = (
    *("quantization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("speculative_config", "speculative_model", "kv_offload_gib", "kv_offload_path"),
)


class EncoderResolver(Resolver):
    def settings(self, *, here: bool) -> Settings:
        config = self._config
        self._refuse_unused()
        dtype = self._precision.choose_dtype()
        budget = self._budget(dtype=dtype, kv_dtype=dtype)
        threads = self._choose_threads(budget)
        self._check_memory(budget)
        max_model_len = self._context()
        max_num_seqs = self._max_texts()
        # The scheduler counts blocks; no memory is behind them, so there are as many as could ever be asked for.
        num_blocks = max_num_seqs * -(-max_model_len // config.block_size)
        self._choices.note(
            "enable_chunked_prefill", "off", "an encoder computes a prompt whole: every token sees all others"
        )
        self._choices.note("enable_prefix_caching", "off", "an encoder keeps no KV cache")
        return Settings(
            device=self._device,
            dtype=dtype,
            kv_dtype=dtype,
            attention_backend=self._choose_attention(dtype),
            load_format=config.load_format,
            num_threads=threads.num_threads,
            cpu_affinity=threads.cpu_affinity,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._batched_tokens(max_num_seqs, max_model_len),
            block_size=config.block_size,
            num_blocks=num_blocks,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            queue_policy=config.scheduling_policy,
            capacity_policy=config.capacity_policy,
            seed=config.seed,
            choices=tuple(self._choices.noted),
            warnings=tuple(self._choices.warnings),
        )

    def _refuse_unused(self) -> None:
        config = self._config
        if config.tensor_parallel_size * config.pipeline_parallel_size > 1 or config.enable_expert_parallel:
            raise ConfigError(
                "an encoder runs on one device: leave out tensor_parallel_size, pipeline_parallel_size and "
                "enable_expert_parallel; several engines (data_parallel_size) share the requests"
            )
        for name in _NOT_FOR_ENCODERS:
            if (value := getattr(config, name)) is not None:
                raise ConfigError(f"{name}={value!r} is not supported for an encoder; leave it out")
        if config.cpu_offload_gb and self._on_gpu:
            raise ConfigError(
                f"cpu_offload_gb={config.cpu_offload_gb:g} is not supported for an encoder, whose weights are small; "
                "leave it out"
            )
        if config.uses_adapters:
            raise ConfigError(f"enable_lora: {why_not_adapted(self._spec)}; leave it out")
        if config.kv_cache_dtype != "auto":
            raise ConfigError(f"kv_cache_dtype={config.kv_cache_dtype!r}: an encoder has no KV cache; leave it out")

    def _check_memory(self, budget: MemoryBudget) -> None:
        weights, memory = budget.weight_bytes, budget.allowed(GPU_MAX_SEQS)
        if weights + memory.for_steps > memory.num_bytes:
            raise ConfigError(
                f"weights of {weights / GIB:.2f} GiB as {budget.dtype} and steps of {memory.for_steps / GIB:.2f} GiB "
                f"do not fit into {memory.num_bytes / GIB:.2f} GiB ({memory.source}); raise gpu_memory_utilization, "
                "free memory, or lower max_num_batched_tokens"
            )

    def _context(self) -> int:
        given, own = self._config.max_model_len, self._spec.max_model_len
        if given is not None and given > own:
            raise ConfigError(
                f"max_model_len={given:,} is more than the model's own context of {own:,} tokens; "
                "lower it, or leave it out"
            )
        self._choices.note("max_model_len", given or own, "as set" if given else "the model's own longest input")
        return given or own

    def _max_texts(self) -> int:
        given, most = self._config.max_num_seqs, self._max_seqs_of_device
        if given is not None:
            self._choices.note("max_num_seqs", given, "as set")
            return given
        value = min(most, self._config.max_num_batched_tokens or most)
        self._choices.note("max_num_seqs", value, "more texts would rarely fit into max_num_batched_tokens")
        return value

    @property
    def _max_seqs_of_device(self) -> int:
        return GPU_MAX_SEQS if self._on_gpu else CPU_MAX_TEXTS

    def _batched_tokens(self, max_num_seqs: int, max_model_len: int) -> int:
        given, minimum = self._config.max_num_batched_tokens, max(max_num_seqs, max_model_len)
        if given is not None:
            if given < minimum:
                raise ConfigError(
                    f"max_num_batched_tokens={given} must be at least max_num_seqs={max_num_seqs} and "
                    f"max_model_len={max_model_len}: an encoder computes a prompt in one step"
                )
            self._choices.note("max_num_batched_tokens", given, "as set")
            return given
        usual = GPU_BATCHED_TEXT_TOKENS if self._on_gpu else CPU_BATCHED_TEXT_TOKENS
        value = max(usual, minimum)
        self._choices.note("max_num_batched_tokens", value, "full rate for texts, and at least the longest one")
        return value
