"""What the markers mean, whose names are registered in pyproject.toml, and the small model that several tests run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, on disk."""
    from tests.engine.tiny import save_model

    directory = tmp_path_factory.mktemp("tiny-llama")
    save_model(directory)
    return directory
