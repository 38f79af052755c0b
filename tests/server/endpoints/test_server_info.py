"""GET /server_info: every setting with its source, and nothing secret."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.server.options import ServerOptions
from tests.server.endpoints.test_admin import ask
from tests.server.whole_server import LimitedEngine, Running, with_server


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


def test_every_setting_has_a_source(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        told = (await ask(made, "/server_info", "GET")).json()
        settings = told["settings"]
        assert {field.name for field in (*fields(EngineConfig), *fields(ServerOptions))} <= settings.keys()
        assert {setting["source"] for setting in settings.values()} <= {"given", "automatic", "default"}
        assert settings["max_num_seqs"]["value"] == engine.settings.max_num_seqs
        assert settings["block_size"] == {"value": engine.settings.block_size, "source": "default", "reason": ""}
        assert (settings["max_n"]["value"], settings["max_n"]["source"]) == (3, "given")
        assert settings["max_num_queued_reqs"]["value"] == 1024
        assert settings["max_num_queued_reqs"]["source"] == "automatic"
        assert told["model"]["vocab_size"] == engine.spec.vocab_size
        assert told["version"]
        assert list(told["start"]["stages"]) == ["load", "compile"]
        assert sum(told["start"]["stages"].values()) <= told["start"]["seconds"] + 0.01  # rounded to milliseconds

    with_server(engine, body, max_n=3)


def test_it_needs_a_key_if_the_server_has_keys_and_shows_none(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made, "/server_info", "GET")).status_code == 401
        answer = await ask(made, "/server_info", "GET", **{"x-api-key": "sesame"})
        assert answer.status_code == 200
        assert "sesame" not in answer.text and "open-up" not in answer.text
        assert answer.json()["settings"]["api_key"]["value"] == "set"

    with_server(engine, body, api_key="sesame", admin_key="open-up")
