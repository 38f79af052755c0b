"""Divides this machine over the workers of a job: cores, memory and GPUs. Each divided setting has a reason.

    GPU of worker i         i % number of visible GPUs; with tensor_parallel_size=n, n GPUs instead of one
    threads                 cores / workers; on a CPU, the physical cores of a NUMA node / workers on it, pinned
    memory                  share of a GPU / workers on it; on a CPU, share of the free memory / workers

Sizes that the user gives (threads, bytes or blocks of KV cache) are those of each worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.config import EngineConfig
from headrace.engine.resolve import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from headrace.engine.settings import Choice, Settings
from headrace.hardware import CpuTopology, read_facts, visible_gpus
from headrace.hardware.cpu_list import cpu_list
from headrace.hardware.topology import Core


@dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """One worker's part of the machine."""

    config: EngineConfig
    num_sharing: int = 1  # workers on the same device, this one included
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


def shares_here(config: EngineConfig, num_workers: int | None) -> list[WorkerShare]:
    """The shares of this machine. By default there is one worker for each visible GPU, or one on the CPU."""
    gpus = () if config.device == "cpu" or num_workers == 1 else _in_groups(visible_gpus(), config.tensor_parallel_size)
    facts = read_facts()
    return shares_of(
        config, num_workers or max(1, len(gpus)), num_cores=facts.num_cores, gpus=gpus, topology=facts.topology
    )


def shares_of(
    config: EngineConfig,
    num_workers: int,
    *,
    num_cores: int,
    gpus: Sequence[str],
    topology: CpuTopology | None = None,
) -> list[WorkerShare]:
    """`gpus`: the ids of the visible ones, or of the groups that share a model; empty on the CPU. A single worker gets
    the whole machine.
    Workers on GPUs find the CPUs near their GPU themselves."""
    if num_workers == 1:
        return [WorkerShare(config=config)]
    shares = [_share(config, worker, num_workers, num_cores, gpus) for worker in range(num_workers)]
    is_automatic = config.num_threads is None and config.cpu_affinity == "auto"
    if topology is None or gpus or not is_automatic or not topology.is_known or topology.limits.cpu_quota is not None:
        return shares
    cores = divide_cores(topology, num_workers)
    return shares if cores is None else [_on_cores(share, own) for share, own in zip(shares, cores, strict=True)]


def divide_cores(topology: CpuTopology, num_workers: int) -> list[tuple[Core, ...]] | None:
    """Physical cores for each worker, all of one NUMA node; None if a node has fewer cores than workers."""
    nodes = list(dict.fromkeys(core.node for core in topology.cores))
    if num_workers < len(nodes):
        nodes = sorted(nodes, key=lambda node: -len(_cores_of(topology, node)))[:num_workers]
    found: dict[int, tuple[Core, ...]] = {}
    for place, node in enumerate(nodes):
        cores, workers = _cores_of(topology, node), range(place, num_workers, len(nodes))
        if len(cores) < len(workers):
            return None
        for number, worker in enumerate(workers):
            found[worker] = cores[number * len(cores) // len(workers) : (number + 1) * len(cores) // len(workers)]
    return [found[worker] for worker in range(num_workers)]


def _cores_of(topology: CpuTopology, node: int) -> tuple[Core, ...]:
    return tuple(core for core in topology.cores if core.node == node)


def _on_cores(share: WorkerShare, cores: tuple[Core, ...]) -> WorkerShare:
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


def _share(config: EngineConfig, worker: int, num_workers: int, num_cores: int, gpus: Sequence[str]) -> WorkerShare:
    place = worker % len(gpus) if gpus else 0
    num_sharing = len(range(place, num_workers, len(gpus))) if gpus else num_workers
    reasons: dict[str, str] = {}
    changes: dict[str, int | float] = {}
    if config.num_threads is None:
        changes["num_threads"] = max(1, num_cores // num_workers + (worker < num_cores % num_workers))
        reasons["num_threads"] = f"its part of {_many(num_cores, 'core')}, which {num_workers} workers share"
    is_sized = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
    if num_sharing > 1 and not is_sized:
        whole = config.gpu_memory_utilization or (GPU_MEMORY_SHARE if gpus else CPU_MEMORY_SHARE)
        changes["gpu_memory_utilization"] = whole / num_sharing
        where = "of the GPU" if gpus else "of the free memory"
        reasons["num_blocks"] = f"{num_sharing} workers divide {whole:.0%} {where}"
    if gpus:
        shared = f", with {num_sharing} workers on it" if num_sharing > 1 else ""
        reasons["device"] = f"GPU {gpus[place]} of {len(gpus)} visible ones{shared}"
    return WorkerShare(
        config=replace(config, **changes),  # type: ignore[arg-type]
        num_sharing=num_sharing,
        gpu=gpus[place] if gpus else None,
        reasons=reasons,
        warnings=_warnings(config, num_workers, num_cores),
    )


def _warnings(config: EngineConfig, num_workers: int, num_cores: int) -> tuple[str, ...]:
    given = config.num_threads
    if given is None or given * num_workers <= num_cores:
        return ()
    cores = _many(num_cores, "core")
    text = f"num_threads={given} for each of {num_workers} workers is more than the {cores} that this process may use"
    return (f"{text}; leave it out to divide them",)


def _with_reason(choice: Choice, reason: str | None) -> Choice:
    if reason is None:
        return choice
    is_divided = choice.name in ("num_threads", "cpu_affinity")
    return replace(choice, reason=reason if is_divided else f"{choice.reason}; {reason}")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
