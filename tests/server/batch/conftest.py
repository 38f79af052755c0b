from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.start import start_engine
from tests.server.batch.batch_server import BatchServer, config_of, serving_batches


@pytest.fixture(scope="session")
def config(tiny_directory: Path) -> EngineConfig:
    return config_of(tiny_directory)


@pytest.fixture(scope="session")
def engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    made = AsyncEngine.over(lambda deliver: start_engine(config, deliver))
    yield made
    asyncio.run(made.close())


@pytest.fixture
def server(engine: AsyncEngine, config: EngineConfig, tmp_path: Path) -> Iterator[BatchServer]:
    with serving_batches(engine, config, tmp_path / "batches") as running:
        yield running


@pytest.fixture
def client(server: BatchServer) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
