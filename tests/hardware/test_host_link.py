from __future__ import annotations

from pathlib import Path

import pytest

from headrace.hardware.host_link import pcie, read_host_link

BUS = "0000:3b:00.0"


def link_of(root: Path, speed: str, width: str) -> object:
    folder = root / "sys/bus/pci/devices" / BUS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "max_link_speed").write_text(speed)
    (folder / "current_link_width").write_text(width)
    return read_host_link(BUS, root)


def test_the_link_of_a_gpu_is_read_from_sysfs(tmp_path: Path) -> None:
    assert link_of(tmp_path, "32.0 GT/s PCIe\n", "16\n") == pcie(5)
    assert link_of(tmp_path, "16.0 GT/s PCIe\n", "8\n") == pcie(4, 8)
    assert pcie(4, 8).name == "PCIe 4.0 x8"
    assert pcie(5).bytes_per_s == pytest.approx(63e9, rel=0.01)


@pytest.mark.parametrize(("speed", "width"), [("Unknown\n", "16"), ("32.0 GT/s", "0"), ("7.0 GT/s", "16"), ("", "")])
def test_a_link_that_the_machine_does_not_tell_is_unknown(tmp_path: Path, speed: str, width: str) -> None:
    assert link_of(tmp_path, speed, width) is None
    assert read_host_link("0000:00:00.0", tmp_path) is None
