from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.serving import Server, serving


@pytest.fixture(scope="session")
def server(tiny_directory: Path) -> Iterator[Server]:
    with serving(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
