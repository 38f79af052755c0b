from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.tiny import save_model

    directory = tmp_path_factory.mktemp("tiny-llama")
    save_model(directory)
    return directory


@pytest.fixture(scope="session")
def llm(tiny_directory: Path) -> Iterator[LLM]:
    with LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as engine:
        yield engine
