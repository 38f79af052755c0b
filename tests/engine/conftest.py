from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM


@pytest.fixture(scope="session")
def llm(tiny_directory: Path) -> Iterator[LLM]:
    with LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm() -> Iterator[LLM]:
    """The default model, for tests marked `embedded`."""
    with LLM(max_model_len=512) as engine:
        yield engine
