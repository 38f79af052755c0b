from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from headrace.config import EngineConfig
from tests.server.batch.batch_server import BatchServer, config_of, serving_batches
from tests.server.whole_server import LimitedEngine


@pytest.fixture(scope="session")
def config(tiny_directory: Path) -> EngineConfig:
    return config_of(tiny_directory)


@pytest.fixture(scope="session")
def engine(config: EngineConfig) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(config)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def server(engine: LimitedEngine, config: EngineConfig, tmp_path: Path) -> Iterator[BatchServer]:
    with serving_batches(engine, config, tmp_path / "batches") as running:
        yield running
    engine.client.limit_running(None)


@pytest.fixture
def client(server: BatchServer) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
