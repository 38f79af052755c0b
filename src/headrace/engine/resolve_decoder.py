"""The settings of a model that generates: how many sequences run at once, how large the KV cache is, and how many
tokens a step computes."""

from __future__ import annotations

from typing import TypedDict

from headrace.engine.adapter_limits import choose_adapters
from headrace.engine.kv_offloading import Offload, choose_offload
from headrace.engine.memory_budget import GIB, GPU_BATCHED_TOKENS, MIB, MemoryBudget
from headrace.engine.offloading import (
    WeightOffload,
    choose_weight_offload,
    describe_offload,
    disk_warning,
    offload_warning,
)
from headrace.engine.resolver import GPU_MAX_SEQS, Resolver
from headrace.engine.setting_warnings import (
    MIN_SEQ_TOKENS,
    warn_about_block_size,
    warn_about_memory_share,
    warn_about_slots,
)
from headrace.engine.settings import Settings
from headrace.engine.speculating import check_speculation, choose_speculation
from headrace.errors import ConfigError
from headrace.speculation import Speculation

# On a CPU a step reads all weights from memory; with this many sequences that is a small part of its time.
CPU_FULL_RATE_SEQS = 128
CPU_BATCHED_TOKENS = 512

# GEMMs reach the full rate of a GPU from about 512 rows on, if tiles of 128 x 128 of the narrowest GEMM fill its
# processors, of which there are about 128. More sequences (up to GPU_MAX_SEQS) pay only if the KV cache holds them up
# to a usual length: otherwise they make every step longer, and wait for each other.
GPU_MIN_FULL_RATE_SEQS = 512
GPU_USUAL_TOKENS = 1024
GPU_TILE_AREA = 128 * 128 * 128
GPU_FULL_STEP_TOKENS = 2048  # GEMMs reach their full rate long before; a prompt need not be chunked to fill such a step
GPU_START_FRACTION = 32  # when all slots are taken, new sequences start once 1/32 of the slots are free


class _Pace(TypedDict, total=False):
    """Fields of Settings that say how a GPU is kept busy."""

    min_free_slots_to_start: int
    full_step_tokens: int
    full_rate_seqs: int


class DecoderResolver(Resolver):
    def settings(self, *, here: bool) -> Settings:
        config = self._config
        self._ranks.decide(self._choices.note, self._choices.warn)
        check_speculation(config, self._spec, self._draft, on_gpu=self._on_gpu)
        dtype = self._precision.choose_dtype()
        quantization = self._precision.choose_quantization(dtype)
        adapters = choose_adapters(
            config,
            self._spec,
            num_ranks=self._ranks.num_ranks,
            on_gpu=self._on_gpu,
            dtype=dtype,
            choices=self._choices,
        )
        kv_dtype = self._precision.choose_kv_dtype(dtype)
        budget = self._budget(dtype=dtype, kv_dtype=kv_dtype, adapters=adapters)
        threads = self._choose_threads(budget)
        weight_offload = self._choose_weight_offload(budget)
        max_seqs = config.max_num_seqs or self._max_seqs(budget)
        num_blocks = self._choose_num_blocks(budget, max_seqs)
        max_num_seqs = self._choose_max_num_seqs(budget, num_blocks, max_seqs)
        max_model_len = self._choose_max_model_len(num_blocks)
        max_num_batched_tokens = self._choose_max_num_batched_tokens(max_num_seqs, max_model_len)
        enable_prefix_caching = self._choose_prefix_caching(budget, max_num_seqs)
        offload = self._choose_offload(budget)
        self._warn(budget, num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        settings = Settings(
            device=self._device,
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
            attention_backend=self._choose_attention(dtype),
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
            speculation=self._choose_speculation(max_num_seqs, max_num_batched_tokens, max_model_len),
            kv_offload_gib=offload.host_gib,
            kv_offload_path=config.kv_offload_path,
            kv_offload_disk_gib=offload.disk_gib,
            num_host_blocks=offload.num_host_blocks,
            host_block_bytes=offload.host_block_bytes,
            adapters=adapters,
            choices=tuple(self._choices.noted),
            warnings=tuple(self._choices.warnings),
        )
        if here:
            self._refuse_more_than_host_memory(settings.kv_offload_gib)
            budget.refuse_more(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        return settings

    def _refuse_more_than_host_memory(self, kv_offload_gib: float) -> None:
        free = self._facts.free_memory
        if int(kv_offload_gib * GIB) > free:
            raise ConfigError(
                f"kv_offload_gib={kv_offload_gib:g} is more than the {free / GIB:.1f} GiB of host memory that "
                "are free; lower it, or use kv_offload_path for the rest"
            )

    @property
    def _has_states(self) -> bool:
        return self._spec.recurrent is not None

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

    def _warn(self, budget: MemoryBudget, *, num_blocks: int, max_num_seqs: int, max_model_len: int) -> None:
        config, warn = self._config, self._choices.warn
        warn_about_block_size(config, warn, on_gpu=self._on_gpu)
        warn_about_memory_share(config, self._facts, warn, on_gpu=self._on_gpu)
        if config.max_num_seqs is not None:  # an automatic value is never too large
            warn_about_slots(
                self._spec,
                warn,
                max_num_seqs=max_num_seqs,
                cache_tokens=num_blocks * config.block_size,
                max_model_len=max_model_len,
                block_size=config.block_size,
                dtype=budget.dtype,
                allowed_bytes=max(1, budget.allowed(max_num_seqs).num_bytes),
            )
        if self._on_gpu and config.cpu_offload_gb:
            warn(offload_warning(self._facts, budget.streamed(), max_num_seqs=max_num_seqs))

    # ---- sequences

    def _max_seqs(self, budget: MemoryBudget) -> int:
        """The maximum before the size of the KV cache is considered."""
        return budget.num_seqs_with_states(self._max_seqs_by_rate(budget))

    def _max_seqs_by_rate(self, budget: MemoryBudget) -> int:
        if not self._on_gpu:
            return CPU_FULL_RATE_SEQS
        with_states = budget.num_seqs_with_states(GPU_MAX_SEQS)
        num_blocks = budget.num_blocks_as_set or budget.num_blocks_that_fit(with_states)
        if num_blocks * self._config.block_size >= GPU_MAX_SEQS * GPU_USUAL_TOKENS:
            return GPU_MAX_SEQS
        return min(GPU_MAX_SEQS, self._full_rate_seqs())

    def _full_rate_seqs(self) -> int:
        return max(GPU_MIN_FULL_RATE_SEQS, -(-GPU_TILE_AREA // self._spec.hidden_size // 64) * 64)

    def _choose_max_num_seqs(self, budget: MemoryBudget, num_blocks: int, max_seqs: int) -> int:
        given = self._config.max_num_seqs
        if given is not None:
            self._choices.note("max_num_seqs", given, "as set")
            return given
        device = "GPU" if self._on_gpu else "CPU"
        full_rate = f"a {device} reaches its full rate with this many sequences; more would mostly use memory"
        in_cache = max(1, num_blocks * self._config.block_size // MIN_SEQ_TOKENS)
        if self._has_states and max_seqs < self._max_seqs_by_rate(budget):
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
        self._choices.note("max_num_seqs", value, reason)
        return value

    # ---- the KV cache

    def _choose_num_blocks(self, budget: MemoryBudget, max_num_seqs: int) -> int:
        config, num_blocks = self._config, budget.num_blocks_as_set
        if num_blocks is None:
            return self._choose_blocks_that_fit(budget, max_num_seqs)
        reason = "as set by num_gpu_blocks_override"
        if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is None:
            reason = f"as set: {config.kv_cache_memory_bytes / GIB:.2f} GiB of KV cache"
        self._choices.note("num_blocks", num_blocks, reason)
        return num_blocks

    def _choose_blocks_that_fit(self, budget: MemoryBudget, max_num_seqs: int) -> int:
        room = budget.num_blocks_that_fit(max_num_seqs)
        if room < 1:
            raise self._no_room(budget, max_num_seqs)
        context = self._config.max_model_len or self._spec.max_model_len
        max_blocks = budget.max_blocks(max_num_seqs)
        if max_blocks <= room:
            reason = f"{max_num_seqs} sequences of {context:,} tokens: more is never needed"
            self._choices.note("num_blocks", max_blocks, reason)
            return max_blocks
        memory = budget.allowed(max_num_seqs)
        less = f"{budget.weight_bytes / GIB:.2f} GiB of weights"
        if self._has_states:
            less += f", {budget.state_bytes(max_num_seqs) / GIB:.2f} GiB of recurrent states"
        if memory.for_steps:
            less += f" and {memory.for_steps / GIB:.2f} GiB for steps"
        size = f"{room * budget.block_bytes / GIB:.2f} GiB"
        self._choices.note("num_blocks", room, f"{size}: {memory.source}, less {less}")
        return room

    def _no_room(self, budget: MemoryBudget, max_num_seqs: int) -> ConfigError:
        memory, states = budget.allowed(max_num_seqs), budget.state_bytes(max_num_seqs)
        of_states = f", recurrent states of {states / GIB:.2f} GiB ({max_num_seqs} slots)" if states else ""
        lower = "max_num_batched_tokens or max_num_seqs" if states else "max_num_batched_tokens"
        return ConfigError(
            f"weights of {budget.weight_bytes / GIB:.2f} GiB as {budget.kind or budget.dtype}{of_states} and steps of "
            f"{memory.for_steps / GIB:.2f} GiB leave no room for a KV cache: {memory.num_bytes / GIB:.2f} GiB may be "
            f"used ({memory.source}); raise gpu_memory_utilization, free memory, lower {lower}, or "
            "take a smaller model"
        )

    def _choose_prefix_caching(self, budget: MemoryBudget, max_num_seqs: int) -> bool:
        if not self._has_states:
            return self._config.enable_prefix_caching
        self._choices.note(
            "recurrent_states",
            f"{budget.state_bytes(max_num_seqs) / MIB:,.1f} MiB",
            f"{max_num_seqs:,} slots of {budget.state_bytes_per_slot / MIB:,.1f} MiB",
        )
        if self._config.enable_prefix_caching:
            reason = "layers of the model have a recurrent state, which cached blocks of a prefix do not contain"
            self._choices.note("enable_prefix_caching", "off", reason)
        return False

    def _choose_offload(self, budget: MemoryBudget) -> Offload:
        config = self._config
        why_not = None if config.enable_prefix_caching else "enable_prefix_caching is off"
        if self._has_states:
            why_not = "layers of the model have a recurrent state, so none are cached"
        found = choose_offload(
            config,
            block_bytes=budget.block_bytes_without_draft,
            num_ranks=self._ranks.num_ranks,
            num_local_ranks=self._ranks.num_local,
            why_not=why_not,
            note=self._choices.note,
        )
        if found.num_host_blocks and not self._on_gpu and config.kv_offload_path is None:
            self._choices.warn(
                f"kv_offload_gib={found.host_gib:g}: on a CPU the KV cache is in host memory too; a larger "
                "kv_cache_memory_bytes does the same without copies; kv_offload_path adds a disk"
            )
        return found

    # ---- tokens of a sequence and of a step

    def _choose_max_model_len(self, num_blocks: int) -> int:
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
            self._choices.note("max_model_len", given, "as set")
            return given
        value = min(own, in_cache)
        reason = "the model's own context" if value == own else "what the KV cache can hold"
        self._choices.note("max_model_len", value, reason)
        return value

    def _choose_max_num_batched_tokens(self, max_num_seqs: int, max_model_len: int) -> int:
        given = self._config.max_num_batched_tokens
        minimum, why = max_num_seqs, f"max_num_seqs={max_num_seqs}: each running sequence needs one token a step"
        if not self._config.enable_chunked_prefill and max_model_len > minimum:
            minimum = max_model_len
            why = f"max_model_len={max_model_len}: without chunked prefill a prompt must fit in one step"
        if given is not None:
            if given < minimum:
                raise ConfigError(f"max_num_batched_tokens={given} must be at least {why}")
            self._choices.note("max_num_batched_tokens", given, "as set")
            return given
        value = GPU_BATCHED_TOKENS if self._on_gpu else CPU_BATCHED_TOKENS
        if minimum > value:
            self._choices.note("max_num_batched_tokens", minimum, why)
            return minimum
        reason = "full rate for prompts, and steps short enough for streams"
        self._choices.note("max_num_batched_tokens", value, reason)
        return value

    # ---- speculation, and weights in host memory

    def _choose_speculation(
        self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> Speculation | None:
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
            reason = f"as set: {drafts}, as far as they are accepted"
            self._choices.note("speculative_config", found.config.method, reason)
        return found

    def _choose_weight_offload(self, budget: MemoryBudget) -> WeightOffload:
        if not self._config.cpu_offload_gb:
            return WeightOffload()
        if not self._on_gpu:
            self._choices.note("cpu_offload_gb", "0", "on a CPU all weights are in host memory")
            return WeightOffload()
        found, streamed = choose_weight_offload(
            self._config,
            self._facts,
            budget.streamed(),
            layers=budget.layer_bytes,
            num_local=self._ranks.num_local,
        )
        num_layers = self._ranks.first_shards.layers.size
        describe_offload(self._config, streamed, num_layers=num_layers, note=self._choices.note)
        if streamed.disk_indexes:
            self._choices.warn(disk_warning(streamed))
        return found
