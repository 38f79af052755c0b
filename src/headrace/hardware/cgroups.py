"""The limits of this process' control groups, of version 1 or 2: CPU time, CPUs and memory.

A limit of any group above counts too, so the smallest one is taken. What cannot be read is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.hardware.cpu_list import parse_cpu_list
from headrace.hardware.system_files import ROOT, read_text

_NO_LIMIT_BYTES = 1 << 60  # version 1 writes a number near 2**63 if there is none
_V1_FOLDERS = {"cpu": ("cpu", "cpu,cpuacct"), "memory": ("memory",), "cpuset": ("cpuset",)}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None: no limit."""

    cpu_quota: float | None = None  # CPUs' worth of time
    cpus: frozenset[int] | None = None
    memory: MemoryLimit | None = None  # the one with the least memory left


def read_limits(root: Path = ROOT) -> CgroupLimits:
    groups = _own_groups(root)
    quotas = [quota for folder in _folders(root, groups, "cpu") if (quota := _quota(folder)) is not None]
    limits = [limit for folder in _folders(root, groups, "memory") if (limit := _memory(folder)) is not None]
    cpus = [found for folder in _folders(root, groups, "cpuset") if (found := _cpus(folder))]
    return CgroupLimits(
        cpu_quota=min(quotas, default=None),
        cpus=frozenset.intersection(*cpus) if cpus else None,
        memory=min(limits, key=lambda limit: limit.free_bytes, default=None),
    )


def _own_groups(root: Path) -> dict[str, str]:
    """The path of this process' group, by controller of version 1; that of version 2 has no name."""
    groups: dict[str, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isdecimal():
            groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _folders(root: Path, groups: dict[str, str], controller: str) -> Iterator[Path]:
    """The folders of this process' group and of all above it. In a container without a namespace for control groups,
    the path is the host's and its folder is missing: then only the root of what is mounted counts."""
    mounted = root / "sys/fs/cgroup"
    mounts = [(mounted / name, groups.get(controller, "/")) for name in _V1_FOLDERS[controller]]
    for mount, path in [*mounts, (mounted, groups.get("", "/"))]:
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    v2 = read_text(folder / "cpu.max").split()
    quota, period = (
        v2 if len(v2) == 2 else (read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
    )
    allowed, whole = _number(quota), _number(period)
    return allowed / whole if allowed is not None and whole and allowed > 0 else None


def _memory(folder: Path) -> MemoryLimit | None:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit = _number(read_text(folder / limit_name))
        if limit is not None and 0 < limit < _NO_LIMIT_BYTES:
            used = _number(read_text(folder / used_name)) or 0
            return MemoryLimit(limit, max(0, used - _reclaimable(folder)))
    return None


def _reclaimable(folder: Path) -> int:
    """Bytes of files that were read once: the system drops them when memory is needed."""
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return _number(value) or 0
    return 0


def _cpus(folder: Path) -> frozenset[int]:
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        if found := parse_cpu_list(read_text(folder / name)):
            return found
    return frozenset()


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
