"""How fast a GPU copies from host memory: its PCIe link, from sysfs. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.hardware.system_files import ROOT, read_text

# Usable bytes/s of one lane and direction, after the encoding, by the transfers/s that sysfs tells (in GT/s).
_LANE_BYTES_PER_S = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.563e9}
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
COPY_EFFICIENCY = 0.85  # of these, what large copies from pinned memory reach: 0.88 on an H200 with PCIe 5.0


@dataclass(frozen=True, slots=True)
class HostLink:
    name: str  # PCIe 5.0 x16
    bytes_per_s: float  # of one direction

    @property
    def copy_bytes_per_s(self) -> float:
        """What copies of weights are expected to reach."""
        return self.bytes_per_s * COPY_EFFICIENCY


def pcie(generation: int, num_lanes: int = 16) -> HostLink:
    rate = next(rate for rate, known in _GENERATIONS.items() if known == generation)
    return HostLink(f"PCIe {generation}.0 x{num_lanes}", _LANE_BYTES_PER_S[rate] * num_lanes)


def read_host_link(bus_id: str, root: Path = ROOT) -> HostLink | None:
    """The link of a PCI device at its best: an idle GPU slows it down. None: the machine does not tell."""
    folder = root / "sys/bus/pci/devices" / bus_id
    speed = re.match(r"[\d.]+", read_text(folder / "max_link_speed"))  # 32.0 GT/s PCIe
    lanes = read_text(folder / "current_link_width").strip()
    generation = None if speed is None else _GENERATIONS.get(float(speed[0]))
    if generation is None or not lanes.isdecimal() or not 1 <= int(lanes) <= 32:
        return None
    return pcie(generation, int(lanes))
