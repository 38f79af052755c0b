"""Divides this machine over several engines: the workers of a job, or the engines of a server. Each divided setting has
a reason.

    GPU of engine i         i % number of visible GPUs; of a model on n ranks, n GPUs instead of one
    threads                 cores / engines; on a CPU, the physical cores of a NUMA node / engines on it, pinned
    memory                  share of a GPU / engines on it; on a CPU, share of the free memory / engines

Sizes that the user gives (threads, bytes or blocks of KV cache) are those of each engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.config import EngineConfig
from headrace.engine.memory_budget import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from headrace.engine.settings import Choice, Settings
from headrace.errors import ConfigError
from headrace.hardware import CpuTopology, read_facts, visible_gpus
from headrace.hardware.cpu_list import cpu_list
from headrace.hardware.topology import Core


@dataclass(frozen=True, kw_only=True)
class EngineShare:
    """One engine's part of the machine."""

    config: EngineConfig
    num_sharing: int = 1  # engines on the same device, this one included
    gpu: str | None = None  # its id, as in CUDA_VISIBLE_DEVICES
    reasons: Mapping[str, str] = field(default_factory=dict)  # by setting
    warnings: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What the engine's process gets beside this process's environment."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}

    def explained(self, settings: Settings) -> Settings:
        """The settings that were resolved from `config`, with the reasons of the division."""
        choices = [_with_reason(choice, self.reasons.get(choice.name)) for choice in settings.choices]
        return replace(settings, choices=tuple(choices), warnings=(*self.warnings, *settings.warnings))


def shares_here(config: EngineConfig, num_engines: int | None, *, noun: str = "worker") -> list[EngineShare]:
    """The shares of this machine. By default there is one engine for each visible GPU, or one on the CPU. `noun`: what
    the user calls an engine."""
    if config.nnodes > 1:
        if num_engines not in (None, 1):
            raise ConfigError(
                f"nnodes={config.nnodes} is for one engine, and {num_engines} {noun}s were asked for; leave out one of "
                "them"
            )
        num_engines = 1
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    gpus = () if config.device == "cpu" or num_engines == 1 else _in_groups(visible_gpus(), num_ranks)
    facts, size = read_facts(), num_engines or max(1, len(gpus))
    return shares_of(config, size, num_cores=facts.num_cores, gpus=gpus, topology=facts.topology, noun=noun)


def shares_of(
    config: EngineConfig,
    num_engines: int,
    *,
    num_cores: int,
    gpus: Sequence[str],
    topology: CpuTopology | None = None,
    noun: str = "worker",
) -> list[EngineShare]:
    """`gpus`: the ids of the visible ones, or of the groups that share a model; empty on the CPU. A single engine gets
    the whole machine. Engines on GPUs find the CPUs near their GPU themselves."""
    if num_engines == 1:
        return [EngineShare(config=config)]
    machine = _Machine(num_cores, gpus, num_engines, noun)
    shares = [_share(config, number, machine) for number in range(num_engines)]
    is_automatic = config.num_threads is None and config.cpu_affinity == "auto"
    if topology is None or gpus or not is_automatic or not topology.is_known or topology.limits.cpu_quota is not None:
        return shares
    cores = divide_cores(topology, num_engines)
    return shares if cores is None else [_on_cores(share, own) for share, own in zip(shares, cores, strict=True)]


def divide_cores(topology: CpuTopology, num_engines: int) -> list[tuple[Core, ...]] | None:
    """Physical cores for each engine, all of one NUMA node; None if a node has fewer cores than engines."""
    nodes = list(dict.fromkeys(core.node for core in topology.cores))
    if num_engines < len(nodes):
        nodes = sorted(nodes, key=lambda node: -len(_cores_of(topology, node)))[:num_engines]
    found: dict[int, tuple[Core, ...]] = {}
    for place, node in enumerate(nodes):
        cores, engines = _cores_of(topology, node), range(place, num_engines, len(nodes))
        if len(cores) < len(engines):
            return None
        for number, engine in enumerate(engines):
            found[engine] = cores[number * len(cores) // len(engines) : (number + 1) * len(cores) // len(engines)]
    return [found[engine] for engine in range(num_engines)]


def _cores_of(topology: CpuTopology, node: int) -> tuple[Core, ...]:
    return tuple(core for core in topology.cores if core.node == node)


def _on_cores(share: EngineShare, cores: tuple[Core, ...]) -> EngineShare:
    affinity = cpu_list(core.cpus[0] for core in cores)
    reason = f"its own physical cores, on NUMA node {cores[0].node}"
    return replace(
        share,
        config=replace(share.config, num_threads=len(cores), cpu_affinity=affinity),
        reasons={**share.reasons, "num_threads": reason, "cpu_affinity": reason},
    )


def _in_groups(gpus: Sequence[str], size: int) -> list[str]:
    """GPUs in groups of `size`, as CUDA_VISIBLE_DEVICES has them. What is left over is not used."""
    return [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]


class _Machine(NamedTuple):
    num_cores: int
    gpus: Sequence[str]
    num_engines: int  # that divide it
    noun: str


def _share(config: EngineConfig, number: int, machine: _Machine) -> EngineShare:
    num_cores, gpus, num_engines, noun = machine
    place = number % len(gpus) if gpus else 0
    num_sharing = len(range(place, num_engines, len(gpus))) if gpus else num_engines
    reasons: dict[str, str] = {}
    changes: dict[str, int | float] = {}
    if config.num_threads is None:
        changes["num_threads"] = max(1, num_cores // num_engines + (number < num_cores % num_engines))
        reasons["num_threads"] = f"its part of {_many(num_cores, 'core')}, which {num_engines} {noun}s share"
    is_sized = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
    if num_sharing > 1 and not is_sized:
        whole = config.gpu_memory_utilization or (GPU_MEMORY_SHARE if gpus else CPU_MEMORY_SHARE)
        changes["gpu_memory_utilization"] = whole / num_sharing
        where = "of the GPU" if gpus else "of the free memory"
        reasons["num_blocks"] = f"{num_sharing} {noun}s divide {whole:.0%} {where}"
    if gpus:
        shared = f", with {num_sharing} {noun}s on it" if num_sharing > 1 else ""
        reasons["device"] = f"GPU {gpus[place]} of {len(gpus)} visible ones{shared}"
    return EngineShare(
        config=replace(config, **changes),  # type: ignore[arg-type]
        num_sharing=num_sharing,
        gpu=gpus[place] if gpus else None,
        reasons=reasons,
        warnings=_warnings(config, machine),
    )


def _warnings(config: EngineConfig, machine: _Machine) -> tuple[str, ...]:
    given, num_engines = config.num_threads, machine.num_engines
    if given is None or given * num_engines <= machine.num_cores:
        return ()
    each, cores = f"each of {num_engines} {machine.noun}s", _many(machine.num_cores, "core")
    text = f"num_threads={given} for {each} is more than the {cores} that this process may use"
    return (f"{text}; leave it out to divide them",)


def _with_reason(choice: Choice, reason: str | None) -> Choice:
    if reason is None:
        return choice
    is_divided = choice.name in ("num_threads", "cpu_affinity")
    return replace(choice, reason=reason if is_divided else f"{choice.reason}; {reason}")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
