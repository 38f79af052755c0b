"""How the GPUs of a machine are connected with each other and with its CPUs: NVLink, NVSwitch, PCIe, NUMA nodes.

From NVML through the optional package nvidia-ml-py, and from sysfs. What cannot be read is left out. Imports no torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from headrace.hardware.cpu_list import cpu_list, parse_cpu_list
from headrace.hardware.system_files import ROOT, read_text

Link = Literal["nvswitch", "nvlink", "pcie switch", "pcie root", "numa node", "system", "unknown"]
MAX_NVLINKS = 18
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
# The lowest common ancestor of two devices, NVML_TOPOLOGY_*: the highest value that each name covers.
_ANCESTORS: tuple[tuple[int, Link], ...] = ((20, "pcie switch"), (30, "pcie root"), (40, "numa node"), (50, "system"))


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Where a GPU is plugged in."""

    index: int
    uuid: str
    bus_id: str  # as sysfs writes it: 0000:3b:00.0
    node: int | None = None  # NUMA node; None: the machine does not tell
    local_cpus: frozenset[int] = frozenset()  # empty: the machine does not tell
    num_nvlinks: int = 0
    is_on_switch: bool = False

    @property
    def name(self) -> str:
        return f"NUMA node {self.node}" if self.node is not None else f"CPUs {cpu_list(self.local_cpus)}"


@dataclass(frozen=True, slots=True)
class GpuTopology:
    gpus: tuple[GpuPlace, ...]
    links: dict[tuple[int, int], Link]  # by indices, the smaller one first

    def describe(self) -> str:
        """`8 GPUs: all pairs by nvswitch`, or how many pairs have which connection."""
        counts: dict[Link, int] = {}
        for link in self.links.values():
            counts[link] = counts.get(link, 0) + 1
        head = f"{len(self.gpus)} GPU{'' if len(self.gpus) == 1 else 's'}"
        if not counts:
            return head
        if len(counts) == 1:
            return f"{head}: all pairs by {next(iter(counts))}"
        return f"{head}: " + ", ".join(f"{count} pairs by {link}" for link, count in counts.items())


def read_gpu_topology(root: Path = ROOT, nvml: Any = None) -> GpuTopology | None:
    """All GPUs of the machine; None if there is no driver or no package to ask it. `nvml`: the module, for tests."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  ImportError, or NVML's errors, whose class may not have been imported
        return None
    try:
        return _Reader(nvml, root).read()
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def place_of(bus_id: str, root: Path = ROOT, *, index: int = 0, uuid: str = "") -> GpuPlace:
    """NUMA node and CPUs near a PCI device."""
    folder = root / "sys/bus/pci/devices" / bus_id
    node = read_text(folder / "numa_node")
    cpus = parse_cpu_list(read_text(folder / "local_cpulist"))
    return GpuPlace(index, uuid, bus_id, int(node) if node.isdecimal() else None, cpus)  # -1: not told


def sysfs_bus_id(bus_id: str) -> str:
    """NVML writes the domain with eight digits, and in upper case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


class _Reader:
    def __init__(self, nvml: Any, root: Path) -> None:
        self._nvml = nvml
        self._root = root

    def read(self) -> GpuTopology:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        gpus, peers = [], []
        for index, handle in enumerate(handles):
            links = self._nvlinks(handle)
            bus_id = sysfs_bus_id(_str(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
            place = place_of(bus_id, self._root, index=index, uuid=_str(self._nvml.nvmlDeviceGetUUID(handle)))
            on_switch = any(is_switch for _, is_switch in links)
            gpus.append(
                GpuPlace(index, place.uuid, bus_id, place.node, place.local_cpus, len(links), is_on_switch=on_switch)
            )
            peers.append({peer for peer, is_switch in links if not is_switch})
        pairs = combinations(range(len(gpus)), 2)
        return GpuTopology(tuple(gpus), {(a, b): self._link(handles, gpus, peers, a, b) for a, b in pairs})

    def _link(self, handles: list[Any], gpus: list[GpuPlace], peers: list[set[str]], one: int, other: int) -> Link:
        if gpus[one].is_on_switch and gpus[other].is_on_switch:
            return "nvswitch"
        if gpus[other].bus_id in peers[one] or gpus[one].bus_id in peers[other]:
            return "nvlink"
        try:
            level = self._nvml.nvmlDeviceGetTopologyCommonAncestor(handles[one], handles[other])
        except self._nvml.NVMLError:
            return "unknown"
        return next((name for most, name in _ANCESTORS if level <= most), "unknown")

    def _nvlinks(self, handle: Any) -> list[tuple[str, bool]]:
        """The bus id at the other end of each active link, and whether it is a switch."""
        links = []
        for link in range(MAX_NVLINKS):
            try:
                if not self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
                peer = sysfs_bus_id(_str(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
                links.append((peer, self._is_switch(handle, link)))
            except self._nvml.NVMLError:
                continue  # a GPU without this link
        return links

    def _is_switch(self, handle: Any, link: int) -> bool:
        try:
            return bool(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH)
        except (self._nvml.NVMLError, AttributeError):  # an older driver or package
            return False


def _str(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
