"""What the markers mean; their names are registered in pyproject.toml."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` is skipped, with the reason, where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _sees_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))


def _sees_gpu() -> bool:
    import torch  # late: most runs have no test that asks

    return torch.cuda.is_available()
