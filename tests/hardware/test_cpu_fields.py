"""What is read of the CPU from /proc/cpuinfo."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.hardware import facts
from headrace.hardware.facts import is_amd_with_avx512


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "sse avx2 avx512f", True),
        ("AuthenticAMD", "sse avx2", False),
        ("GenuineIntel", "sse avx2 avx512f", False),
    ],
)
def test_amd_processors_with_avx512_are_known(tmp_path: Path, vendor: str, flags: str, expected: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n")
    assert is_amd_with_avx512(tmp_path) is expected


def test_a_machine_without_this_file_has_none(tmp_path: Path) -> None:
    assert not is_amd_with_avx512(tmp_path)


@pytest.mark.parametrize("missing", ["avx2", "fma", "f16c", None])
def test_packed_weights_and_narrow_caches_need_all_that_their_kernels_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    """A virtual machine may hide one of them."""
    monkeypatch.setattr(facts.platform, "machine", lambda: "x86_64")
    flags = " ".join(flag for flag in ("sse", "avx2", "fma", "f16c") if flag != missing)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert facts._multiplies_packed(tmp_path) is (missing is None)
