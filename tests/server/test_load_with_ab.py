"""The OpenAI server under ApacheBench: how refused requests are shown, and that a small engine refuses none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from tests.server.apache_bench import ab_command, ab_report, needs_ab
from tests.server.live import until
from tests.server.whole_server import PROMPT, LimitedEngine, Running, with_server

BODY = json.dumps({"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True})
NUM_SLOTS = 4

pytestmark = needs_ab


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=NUM_SLOTS, num_gpu_blocks_override=256)
    made = LimitedEngine.of(config)
    yield made
    asyncio.run(made.close())


class Load:
    """`ab` on a server whose engine answers the first request, and then holds the others until `report`.

    `ab` opens its other connections only after the first answer.
    """

    def __init__(self, made: Running, engine: LimitedEngine, directory: Path, *, num: int, concurrency: int) -> None:
        self._queue, self._limit = made.server.queue, engine.client.limit_running
        url = f"{made.client.base_url}/v1/completions"
        self._command = ab_command(url, directory, BODY, num=num, concurrency=concurrency)

    async def __aenter__(self) -> Load:
        self._limit(0)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=pipe, stderr=pipe)
        await until(lambda: self._queue.num_waiting == 1)
        self._limit(1)
        await until(lambda: self._queue.num_waiting == 0)
        self._limit(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def report(self) -> dict[str, str]:
        """Let the engine work, and read what `ab` says at its end."""
        self._limit(None)
        out, err = await self._process.communicate()
        assert self._process.returncode == 0, err
        return ab_report(out.decode())


def test_a_refused_request_is_a_non_2xx_response(engine: LimitedEngine, tmp_path: Path) -> None:
    """One request was answered, four wait. `ab` counts the others, which are refused, as complete and not as failed."""

    async def body(made: Running) -> None:
        refusals = made.server.queue.refusals
        async with Load(made, engine, tmp_path, num=20, concurrency=8) as load:
            await until(lambda: made.server.queue.num_waiting == 4 and refusals["queue_full"] == 15)
            report = await load.report()
        assert (report["Complete requests"], report["Failed requests"]) == ("20", "0")
        assert report["Non-2xx responses"] == "15"

    with_server(engine, body, max_num_queued_reqs=4)


def test_more_clients_than_slots_are_not_refused_by_default(engine: LimitedEngine, tmp_path: Path) -> None:
    """32 clients on four slots: a limit of 4 x max_num_seqs refused most of them, at a rate that looked fast."""

    async def body(made: Running) -> None:
        async with Load(made, engine, tmp_path, num=64, concurrency=32) as load:
            await until(lambda: made.server.queue.num_waiting == 32)
            report = await load.report()
        assert (report["Complete requests"], report["Failed requests"]) == ("64", "0")
        assert "Non-2xx responses" not in report
        assert not made.server.queue.refusals

    with_server(engine, body)
