"""What the settings of every kind of model have in common: device, number formats, threads and attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from headrace.adapters import AdapterLimits
from headrace.config import EngineConfig
from headrace.engine.attention import choose_attention
from headrace.engine.choices import Choices
from headrace.engine.memory_budget import MemoryBudget
from headrace.engine.precision import Precision
from headrace.engine.rank_layout import RankLayout
from headrace.engine.settings import Settings
from headrace.engine.threads import MAX_THREADS_PER_CORE, Threads, choose_threads
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.hardware.facts import dotted
from headrace.models.spec import ModelSpec

MIN_CAPABILITY = (8, 0)  # from which GPUs compute in bfloat16 and copy to shared memory in the background: Ampere
GPU_MAX_SEQS = 1024


class Resolver(ABC):
    """Decides in dependency order, and notes each value with its reason. Used once."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None) -> None:
        self._config = config
        self._spec = spec = spec if facts.multiplies_packed else replace(spec, packed_bits=None)
        self._facts = facts
        self._draft = draft
        self._choices = Choices()
        self._device = self._choose_device()
        self._on_gpu = self._device == "cuda"
        self._ranks = RankLayout(config, spec, facts, on_gpu=self._on_gpu)
        self._precision = Precision(config, spec, facts, on_gpu=self._on_gpu, note=self._choices.note)

    @abstractmethod
    def settings(self, *, here: bool) -> Settings:
        """`here`: for an engine that is about to start on this machine, which must be able to hold its KV cache."""

    def _choose_device(self) -> str:
        gpu = self._facts.gpu
        if self._config.device == "cuda" and gpu is None:
            raise ConfigError("device='cuda' was asked for, but torch sees no CUDA GPU; use device='cpu' or 'auto'")
        if self._config.device == "cpu" or gpu is None:
            self._choices.note("device", "cpu", self._facts.cpu_model)
            return "cpu"
        if gpu.capability < MIN_CAPABILITY:
            raise ConfigError(
                f"{gpu.name} has compute capability {dotted(gpu.capability)}, and the kernels need "
                f"{dotted(MIN_CAPABILITY)} (Ampere) or more; use device='cpu'"
            )
        self._choices.note("device", "cuda", gpu.name)
        return "cuda"

    def _budget(self, *, dtype: str, kv_dtype: str, adapters: AdapterLimits | None = None) -> MemoryBudget:
        return MemoryBudget(
            self._config,
            self._spec,
            self._facts,
            ranks=self._ranks,
            on_gpu=self._on_gpu,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kind=self._precision.kind_in_memory,
            draft=self._draft,
            adapters=adapters,
        )

    def _choose_threads(self, budget: MemoryBudget) -> Threads:
        self._check_threads()
        num_ranks = self._ranks.num_local
        weight_bytes = budget.weight_bytes * (1 if self._on_gpu else num_ranks)
        threads = choose_threads(self._config, self._facts, on_gpu=self._on_gpu, weight_bytes=weight_bytes)
        shared = f", {max(1, threads.num_threads // num_ranks)} for each of {num_ranks} ranks" * (num_ranks > 1)
        self._choices.note("num_threads", threads.num_threads, threads.reason + shared)
        if self._facts.topology is not None:
            self._choices.note("cpu_affinity", threads.cpu_affinity, threads.affinity_reason)
        return threads

    def _check_threads(self) -> None:
        given, num_cores = self._config.num_threads, self._facts.num_cores
        if given is None:
            return
        if given > MAX_THREADS_PER_CORE * num_cores:
            raise ConfigError(
                f"num_threads={given:,} is more than {MAX_THREADS_PER_CORE} for each of the {num_cores} cores that "
                "this process may use; leave it out to use all cores"
            )
        if given > num_cores and not self._on_gpu:
            self._choices.warn(
                f"num_threads={given} is more than the {num_cores} cores that this process may use: threads wait "
                f"for each other in every step; set {num_cores} or less"
            )

    def _choose_attention(self, dtype: str) -> str:
        chosen = choose_attention(
            self._config.attention_backend, self._spec, dtype, self._facts.gpu if self._on_gpu else None
        )
        if self._on_gpu:
            self._choices.note("attention_backend", chosen.name, chosen.reason)
        return chosen.name
