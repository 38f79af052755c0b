"""The CPUs that this process may use: physical cores with their SMT siblings, sockets, NUMA nodes with their memory,
and the limits of its control groups. A file that is missing or wrong leaves out what it would have told."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.hardware.cgroups import CgroupLimits, read_limits
from headrace.hardware.cpu_list import parse_cpu_list
from headrace.hardware.system_files import ROOT, read_text

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core, with those of its logical CPUs that this process may use."""

    cpus: tuple[int, ...]
    socket: int = 0
    node: int = 0


@dataclass(frozen=True, slots=True)
class NumaNode:
    index: int
    cpus: frozenset[int]
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CpuTopology:
    cores: tuple[Core, ...]  # at least one, by socket, node and number
    nodes: tuple[NumaNode, ...] = ()  # all of the machine; empty: not known
    limits: CgroupLimits = field(default_factory=CgroupLimits)
    is_known: bool = True  # whether the system told which CPUs are siblings

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def sockets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(core.socket for core in self.cores))

    def cores_of(self, socket: int) -> tuple[Core, ...]:
        return tuple(core for core in self.cores if core.socket == socket)

    def nodes_of(self, cores: Iterable[Core]) -> tuple[NumaNode, ...]:
        indices = {core.node for core in cores}
        return tuple(node for node in self.nodes if node.index in indices)

    def describe(self) -> str:
        cores, cpus = len(self.cores), len(self.cpus)
        text = f"{_many(cores, 'core')} of {_many(len(self.sockets), 'socket')}"
        text += f", {cpus} logical CPUs" if cpus != cores else ""
        text += f", {_many(len(self.nodes), 'NUMA node')}" if self.nodes else ""
        quota = self.limits.cpu_quota
        return text + (f", a quota of {quota:g} CPUs" if quota is not None else "")


def read_topology(root: Path = ROOT, affinity: frozenset[int] | None = None) -> CpuTopology:
    """`affinity`: the mask of this process; None: ask the system."""
    limits = read_limits(root)
    mask = _allowed_cpus(root, affinity)
    allowed = mask if limits.cpus is None else mask & limits.cpus or mask  # a cpuset without any of them is out of date
    nodes = _read_nodes(root)
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    siblings = {cpu: _siblings(root, cpu) for cpu in sorted(allowed)}
    cores = {
        Core(tuple(sorted(group & allowed)), _socket(root, cpu), node_of.get(cpu, 0)) for cpu, group in siblings.items()
    }
    return CpuTopology(
        cores=tuple(sorted(_without_overlap(cores), key=lambda core: (core.socket, core.node, core.cpus))),
        nodes=nodes,
        limits=limits,
        is_known=any((_cpu_folder(root, cpu) / "topology").is_dir() for cpu in allowed),
    )


def _without_overlap(cores: Iterable[Core]) -> list[Core]:
    """Files that contradict each other could list a CPU twice."""
    kept, seen = [], set[int]()
    for core in sorted(cores, key=lambda core: core.cpus):
        if seen.isdisjoint(core.cpus):
            kept.append(core)
            seen.update(core.cpus)
    return kept


def _allowed_cpus(root: Path, affinity: frozenset[int] | None) -> frozenset[int]:
    if affinity:
        return affinity
    if root == ROOT and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return parse_cpu_list(read_text(root / _CPUS / "online")) or frozenset(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    for name in ("core_cpus_list", "thread_siblings_list"):
        found = parse_cpu_list(read_text(_cpu_folder(root, cpu) / "topology" / name))
        if cpu in found:
            return found
    return frozenset({cpu})


def _socket(root: Path, cpu: int) -> int:
    text = read_text(_cpu_folder(root, cpu) / "topology/physical_package_id")
    return int(text) if text.isdecimal() else 0  # -1: the machine does not tell


def _cpu_folder(root: Path, cpu: int) -> Path:
    return root / _CPUS / f"cpu{cpu}"


def _read_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (root / _NODES).glob("node*"):
        if (number := re.fullmatch(r"node(\d+)", folder.name)) is not None:
            memory = dict(re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", read_text(folder / "meminfo")))
            sizes = [1024 * int(memory[name]) if name in memory else None for name in ("MemTotal", "MemFree")]
            nodes.append(NumaNode(int(number[1]), parse_cpu_list(read_text(folder / "cpulist")), *sizes))
    return tuple(sorted(nodes, key=lambda node: node.index))


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
