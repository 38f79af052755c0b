"""Misbehaving connections leave no trace; an engine that dies is restarted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from benchmarks.bad_clients import KINDS, misbehave

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.process.supervisor import EngineSupervisor, Supervision
from headrace.engine.restart_policy import SUPERVISOR_RESTARTS
from headrace.engine.start import start_engine_process
from headrace.server.http.gate import Receive, Scope, Send
from headrace.server.options import ServerOptions
from headrace.server.request_queue import QueueLimits, RequestQueue
from tests.server.live import TEST_TIMEOUT_S, Live, run, until
from tests.server.whole_server import Running, with_server

pytestmark = pytest.mark.processes

NUM_CONNECTIONS = 1000


class ReservingApp:
    """Reserves places in a queue as the endpoints do, and holds them until its client disconnects."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.num_seen = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        self.num_seen += 1
        body = (await receive()).get("body", b"")
        with self.queue.reserve(1, num_tokens=len(body)) as reservation:
            reservation.count_tokens(len(body))
            if self.num_seen % 2:
                reservation.started()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass


def test_a_thousand_misbehaving_connections_leak_nothing() -> None:
    async def body() -> None:
        queue = RequestQueue(ServerOptions(), QueueLimits(10_000, 10_000_000))
        app = ReservingApp(queue)
        process = psutil.Process(os.getpid())
        async with Live(app, api_key="secret") as live:
            await misbehave(live.port, random.Random(7), len(KINDS) * 2)  # warms up what is created once
            await until(lambda: live.lifecycle.num_connections == 0 and live.lifecycle.num_in_flight == 0)
            num_files, num_tasks = process.num_fds(), len(asyncio.all_tasks())
            done = await misbehave(live.port, random.Random(8), NUM_CONNECTIONS)
            assert sum(done.values()) == NUM_CONNECTIONS and set(done) == set(KINDS)
            await until(lambda: live.lifecycle.num_connections == 0 and live.lifecycle.num_in_flight == 0)
            assert process.num_fds() == num_files
            assert len(asyncio.all_tasks()) == num_tasks
            assert app.num_seen > 0
            assert (queue.num_waiting, queue.num_waiting_tokens, queue.num_running) == (0, 0, 0)
            assert (await live.get("/health")).status == 200

    run(body)


@pytest.fixture(scope="module")
def killable(tiny_directory: Path) -> Iterator[AsyncEngine]:
    """An engine in its own process, restarted at once when it dies."""
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=64)
    restarts = replace(SUPERVISOR_RESTARTS, first_delay_s=0.01)
    rules = Supervision(step_timeout_s=TEST_TIMEOUT_S, restarts=restarts, check_s=0.01)
    made = AsyncEngine.over(lambda deliver: start_engine_process(config, deliver, supervision=rules))
    yield made
    asyncio.run(made.close())


def test_a_killed_engine_fails_its_requests_and_health_until_it_is_restarted(
    killable: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_restart, restart = threading.Event(), EngineSupervisor._restart
    monkeypatch.setattr(EngineSupervisor, "_restart", lambda self: (may_restart.wait(TEST_TIMEOUT_S), restart(self)))

    async def body(made: Running) -> None:
        assert killable.pid is not None
        asked = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
        whole = asyncio.create_task(made.complete(max_tokens=400, ignore_eos=True))
        async with made.client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            os.kill(killable.pid, signal.SIGKILL)
            events = [line async for line in lines if line]
        assert '"code":"engine_dead"' in events[-2] and events[-1] == "data: [DONE]"
        answer = await whole
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        assert answer.headers["retry-after"] == "1"
        dead = await made.client.get("/health")
        assert dead.status_code == 503 and dead.json()["error"]["code"] == "engine_dead"
        refused = await made.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        may_restart.set()
        await until(lambda: made.server.state.is_ready)
        assert (await made.client.get("/health")).status_code == 200
        assert (await made.complete()).status_code == 200
        page = (await made.client.get("/metrics")).text
        assert 'headrace:engine_restarts_total{engine="0",model_name="tiny"} 1.0' in page
        assert made.server.queue.num_in_flight == 0

    with_server(killable, body)
