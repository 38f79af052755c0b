from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Each death of an engine collects garbage, which would scan everything that other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
