"""/sleep, /wake_up and /is_sleeping: off by default; the engine's process ends and starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.process.supervisor import Supervision
from headrace.engine.start import start_engine_process
from headrace.errors import ConfigError
from headrace.server.options import ServerOptions
from headrace.server.serve import serve
from tests.server.live import until
from tests.server.test_serve import Running, with_server

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=128)
    made = AsyncEngine.over(partial(start_engine_process, config, supervision=Supervision()))
    yield made
    asyncio.run(made.close())


async def state_of(made: Running, state: str) -> float | None:
    page = (await made.client.get("/metrics")).text.splitlines()
    found = [line for line in page if line.startswith("vllm:engine_sleep_state{") and f'"{state}"' in line]
    return float(found[0].rpartition(" ")[2]) if found else None


def test_sleeping_is_refused_unless_it_is_turned_on(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        answer = await made.client.post("/sleep")
        assert answer.status_code == 404 and "--enable-sleep-mode" in answer.json()["error"]["message"]

    with_server(engine, body)


def test_an_engine_sleeps_without_a_process_and_answers_again_once_all_of_it_is_woken(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        before = (await made.complete(temperature=0, max_tokens=8)).json()["choices"]
        assert (await made.client.post("/sleep?level=1")).json() == {"is_sleeping": True}
        refused = await made.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "asleep"
        assert (await made.client.get("/health")).status_code == 200
        assert (await made.client.get("/ready")).status_code == 503
        assert [await state_of(made, state) for state in ("awake", "weights_offloaded", "discard_all")] == [0, 1, 0]
        assert (await made.client.post("/wake_up?tags=weights")).json() == {"is_sleeping": True}
        assert (await made.client.post("/wake_up?tags=kv_cache")).json() == {"is_sleeping": False}
        assert (await made.complete(temperature=0, max_tokens=8)).json()["choices"] == before
        assert await state_of(made, "awake") == 1

    with_server(engine, body, enable_sleep_mode=True)


def test_with_mode_wait_requests_end_first_and_new_ones_are_refused(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        running = asyncio.create_task(made.complete(max_tokens=400, ignore_eos=True))
        await until(lambda: made.server.queue.num_in_flight == 1)
        sleeping = asyncio.create_task(made.client.post("/sleep?mode=wait"))
        await until(lambda: made.server.state.phase == "asleep")
        assert (await made.complete()).json()["error"]["code"] == "asleep"
        assert (await running).json()["usage"]["completion_tokens"] == 400
        assert (await sleeping).json() == {"is_sleeping": True}
        assert (await made.client.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await made.complete()).status_code == 200

    with_server(engine, body, enable_sleep_mode=True)


@pytest.mark.parametrize("path", ["/sleep?level=3", "/sleep?mode=keep", "/sleep?depth=1", "/wake_up?tags=all"])
def test_what_cannot_be_done_is_refused(engine: AsyncEngine, path: str) -> None:
    async def body(made: Running) -> None:
        assert (await made.client.post(path)).status_code == 400
        assert (await made.client.get("/is_sleeping")).json() == {"is_sleeping": False}

    with_server(engine, body, enable_sleep_mode=True)


def test_with_an_admin_key_sleeping_needs_it(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await made.client.post("/sleep")).status_code == 401
        given = {"Authorization": "Bearer secret-admin-key"}
        assert (await made.client.get("/is_sleeping", headers=given)).status_code == 200

    with_server(engine, body, enable_sleep_mode=True, admin_key="secret-admin-key")


def test_a_server_on_several_nodes_cannot_sleep(tiny_directory: Path) -> None:
    config = EngineConfig(model=str(tiny_directory), pipeline_parallel_size=2, nnodes=2)
    options = ServerOptions(enable_sleep_mode=True, port=0)
    with pytest.raises(ConfigError, match="the other nodes end with an engine that sleeps"):
        serve(config, options, print_line=print)
