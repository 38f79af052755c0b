"""GPUs are found under the names that people and drivers write."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.plan.gpus import GPUS, find_gpu, match_gpu


@pytest.mark.parametrize(
    ("written", "name"), [("h200", "H200"), ("RTX 4090", "RTX4090"), ("a100-80gb", "A100"), ("H100 PCIe", "H100-PCIe")]
)
def test_case_and_separators_do_not_matter(written: str, name: str) -> None:
    assert find_gpu(written).name == name


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
    ],
)
def test_the_names_of_drivers_are_understood(title: str, name: str) -> None:
    found = match_gpu(title)
    assert found is not None and found.name == name


def test_a_gpu_that_is_not_in_the_table_matches_nothing() -> None:
    assert match_gpu("NVIDIA T4000") is None


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        find_gpu("H10")


def test_rates_are_plausible() -> None:
    """FLOPs per byte of every GPU are of the same order: a slip of a factor of ten in a row shows."""
    for gpu in GPUS:
        assert 100 < gpu.bf16_rate / gpu.bandwidth < 500, gpu.name
        assert gpu.fp8_rate is None or 1.9 < gpu.fp8_rate / gpu.bf16_rate < 2.1, gpu.name
        assert 20 < gpu.memory_bytes / 2**30 < 200, gpu.name
