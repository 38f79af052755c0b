from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headrace.models.weights.load import _allocate


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_large_matrices_can_have_huge_pages() -> None:
    """Private memory can, shared memory cannot unless the system is configured for it."""
    matrix = _allocate((1024, 1024), torch.float32, torch.device("cpu"))
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= matrix.data_ptr() < end:
            assert line.split()[1] == "rw-p"
            return
    pytest.fail("the matrix is in no mapping")
