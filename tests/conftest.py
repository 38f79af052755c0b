"""What the markers mean; their names are registered in pyproject.toml."""

from __future__ import annotations

import os
import sys

import pytest
import torch

SEES_GPU = torch.cuda.is_available()
if not SEES_GPU:
    # Triton asks when a kernel, or Triton itself, is imported: before any test is.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` or `interpreted` is skipped, with the reason, where it cannot run."""
    for item in items:
        if item.get_closest_marker("gpu") and not SEES_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))
        if item.get_closest_marker("interpreted"):
            if SEES_GPU:
                item.add_marker(pytest.mark.skip(reason="with a GPU, kernels are compiled: make gpu-test"))
            elif sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="Triton is for Linux only"))
