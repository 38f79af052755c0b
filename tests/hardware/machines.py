"""Fake trees of sysfs, procfs and cgroup, and a fake NVML, of several machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def cpus_of(sockets: int, cores: int, *, threads: int = 1, nodes_per_socket: int = 1) -> dict[str, object]:
    """Logical CPUs as Linux numbers them: first one of every core, then the siblings."""
    num_cores, files = sockets * cores, dict[str, object]()
    nodes: dict[int, list[int]] = {}
    for cpu in range(num_cores * threads):
        core = cpu % num_cores
        socket = core // cores
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = ",".join(str(core + num_cores * thread) for thread in range(threads))
        files |= {f"{folder}/thread_siblings_list": siblings, f"{folder}/physical_package_id": socket}
        nodes.setdefault(core * sockets * nodes_per_socket // num_cores, []).append(cpu)
    files["sys/devices/system/cpu/online"] = f"0-{num_cores * threads - 1}"
    for node, cpus in nodes.items():
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(map(str, cpus))
        memory = 64 * GIB // 1024
        files[f"sys/devices/system/node/node{node}/meminfo"] = (
            f"Node {node} MemTotal:   {memory} kB\nNode {node} MemFree:   {memory // (node + 2)} kB"
        )
    return files


def two_sockets_with_smt(root: Path) -> Path:
    """2 sockets x 8 cores x 2 threads, a NUMA node each."""
    return write(root, cpus_of(2, 8, threads=2))


def container_with_a_quota(root: Path, quota: str = "150000 100000") -> Path:
    """cgroup v2: 1.5 CPUs and 4 GiB, set on the group above this process' own."""
    group = "sys/fs/cgroup/kubepods/pod1"
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/main",
        f"{group}/cpu.max": quota,
        f"{group}/memory.max": 4 * GIB,
        f"{group}/memory.current": 3 * GIB,
        f"{group}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}",
        f"{group}/main/cpu.max": "max 100000",
        f"{group}/main/memory.max": "max",
        f"{group}/main/memory.current": GIB,
    }
    return write(root, cpus_of(1, 8) | files)


def cgroup_v1(root: Path) -> Path:
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n1:name=systemd:/",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": 400000,
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": 100000,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus": "0-7",
    }
    return write(root, cpus_of(1, 16) | files)


def cpuset_with_holes(root: Path) -> Path:
    """CPUs 1, 3 to 5 and 17 of 2 sockets x 8 cores x 2 threads; 1 and 17 are siblings."""
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpuset.cpus.effective": "1,3-5,17"}
    return write(root, cpus_of(2, 8, threads=2) | files)


def vm_without_topology(root: Path) -> Path:
    return write(root, {"sys/devices/system/cpu/online": "0-3", "proc/cpuinfo": "processor : 0"})


# ---- NVML


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """The functions that the topology of GPUs is read with. A handle is an index."""

    bus_ids: Sequence[str]
    ancestors: Mapping[tuple[int, int], int] = field(default_factory=dict)
    links: Mapping[int, Sequence[str]] = field(default_factory=dict)  # bus ids at the other ends
    has_switches: bool = False
    num_shutdowns: int = 0
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.num_shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.bus_ids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=self.bus_ids[gpu].encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        if (one, other) not in self.ancestors:
            raise NVMLError("not supported")
        return self.ancestors[one, other]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= len(self.links.get(gpu, ())):
            raise NVMLError("invalid argument")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return SimpleNamespace(busId=self.links[gpu][link])

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if self.has_switches else 0


def eight_gpus_with_nvswitch(root: Path) -> tuple[Path, FakeNvml]:
    """2 sockets x 32 cores; GPUs 0 to 3 at node 0, the others at node 1; 18 links each to switches."""
    files = cpus_of(2, 32)
    bus_ids = [f"00000000:{0x10 + 8 * gpu:02X}:00.0" for gpu in range(8)]
    for gpu in range(8):
        files |= _pci(f"0000:{0x10 + 8 * gpu:02x}:00.0", node=gpu // 4, cpus="0-31" if gpu < 4 else "32-63")
    links = dict.fromkeys(range(8), ["00000000:C0:00.0"] * 18)
    return write(root, files), FakeNvml(bus_ids, links=links, has_switches=True)


def four_gpus_on_two_roots(root: Path) -> tuple[Path, FakeNvml]:
    """PCIe only: 0 and 1 behind one switch, 2 and 3 under another root of the other socket."""
    files = cpus_of(2, 8, threads=2)
    for gpu, bus in enumerate(("3b", "5e", "af", "d8")):
        files |= _pci(f"0000:{bus}:00.0", node=gpu // 2, cpus="0-7,16-23" if gpu < 2 else "8-15,24-31")
    ancestors = {(0, 1): 20, (2, 3): 30, (0, 2): 50, (0, 3): 50, (1, 2): 50, (1, 3): 50}
    return write(root, files), FakeNvml([f"00000000:{bus}:00.0" for bus in ("3B", "5E", "AF", "D8")], ancestors)


def _pci(bus_id: str, *, node: int, cpus: str) -> dict[str, object]:
    folder = f"sys/bus/pci/devices/{bus_id}"
    return {f"{folder}/numa_node": node, f"{folder}/local_cpulist": cpus}
