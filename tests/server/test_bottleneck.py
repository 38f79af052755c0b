"""The server's diagnosis of itself: its window, its document, its lines in the log; and the real server under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.config import EngineConfig
from headrace.doctor.diagnosis import diagnose
from headrace.doctor.readers.live import evidence_of_pages
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.engine.start import start_engine
from headrace.histogram import Histogram
from headrace.monitor import RequestTimes, ServerMetrics
from headrace.sched import SchedulerStats
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS
from headrace.server.bottleneck import SNAPSHOT_S, WINDOW_S, BottleneckWatch, own_gpu
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import open_listener
from headrace.server.load_log import LINE_S, LoadLog
from headrace.server.options import ServerOptions
from headrace.server.serve import Server
from tests.server.endpoints.test_admin import ask
from tests.server.live import run, until
from tests.server.whole_server import LimitedEngine, Running, with_server

SETTINGS = fake_settings(device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, num_blocks=1000)


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


class Watched:
    """A server without HTTP, whose time and work a test decides."""

    def __init__(self) -> None:
        self.now = 100.0
        self.printed: list[str] = []
        self.metrics = ServerMetrics("m", SETTINGS, memory_share=0.92)
        self.state = SchedulerStats(num_blocks=1000, block_size=16)
        self.has_engine = True
        self._gaps, self._steps = Histogram(TOKEN_GAP_BOUNDS), Histogram(BATCH_TOKENS_BOUNDS)
        self._watch = BottleneckWatch(
            self.metrics,
            self._observe,
            load_log=LoadLog(lambda line, figures: self.printed.append(line)),
            clock=lambda: self.now,
        )

    def work(self, *, num_generated: int = 0, num_prompt: int = 0, num_preemptions: int = 0, **gauges: Any) -> None:
        self._gaps.observe_many(0.02, num_generated)
        self._steps.observe_many(100, 50)
        self.metrics.finished(
            RequestTimes(arrived=0.0, finished=1.0, num_prompt=200, num_generated=100, queued_until=0.1), "stop"
        )
        self.state = replace(
            self.state,
            num_steps=self.state.num_steps + 50,
            num_generated_tokens=self.state.num_generated_tokens + num_generated,
            num_prompt_tokens=self.state.num_prompt_tokens + num_prompt,
            num_preemptions=self.state.num_preemptions + num_preemptions,
            num_recomputed_tokens=self.state.num_recomputed_tokens + 100 * num_preemptions,
            batch_tokens=self._steps.snapshot(),
            token_gaps=self._gaps.snapshot(),
            **gauges,
        )

    def tick(self, seconds: float = 0.0) -> dict[str, Any]:
        self.now += seconds
        for _ in self._watch.slices():
            pass
        document: dict[str, Any] = json.loads(self._watch.document)
        return document

    def page(self) -> str:
        self._observe()
        return self.metrics.render()[0].decode()

    def _observe(self) -> SchedulerStats | None:
        self.metrics.observe(EngineStats(self.state, 0.0, 0.0, started_at=1.0) if self.has_engine else None)
        return self.state if self.has_engine else None


def test_a_server_that_has_just_started_says_so() -> None:
    document = Watched().tick()
    assert (document["schema"], document["outcome"]) == ("headrace.doctor/1", "not enough evidence")
    assert "less than 10 seconds" in document["headline"]


def test_the_diagnosis_is_that_of_the_interval_and_not_of_the_servers_life() -> None:
    server = Watched()
    server.work(num_generated=90_000, num_prompt=90_000, num_preemptions=900)
    server.tick()
    server.work(num_generated=5_000, num_prompt=1_000, num_running=200)
    document = server.tick(SNAPSHOT_S)
    assert document["figures"]["num_preemptions"] == 0
    assert (document["figures"]["output_tokens"], document["figures"]["seconds"]) == (5_000, SNAPSHOT_S)
    assert document["limited_by"] == "decode"


def test_it_is_what_doctor_says_from_two_scrapes() -> None:
    server = Watched()
    server.tick()
    before = server.page()
    server.work(num_generated=5_000, num_prompt=1_000, num_preemptions=50, num_running=200, num_blocks_held=990)
    server.tick(SNAPSHOT_S)
    own = server.tick()
    evidence = evidence_of_pages(before, server.page(), seconds=SNAPSHOT_S, origin=own["origin"])
    scraped = diagnose(replace(evidence, num_running=own["figures"]["num_running"]))
    assert own["limited_by"] == "cache" and own["headline"] == scraped.headline
    assert own == json.loads(json.dumps(scraped.as_json()))


def test_the_window_moves() -> None:
    server = Watched()
    server.tick()
    server.work(num_generated=5_000, num_prompt=1_000, num_preemptions=50, num_running=200)
    assert server.tick(SNAPSHOT_S)["limited_by"] == "cache"
    lengths = []
    for _ in range(4):
        server.work(num_generated=5_000, num_prompt=1_000)
        document = server.tick(SNAPSHOT_S)
        lengths.append(document["figures"]["seconds"])
    assert max(lengths) == lengths[-1] == WINDOW_S
    assert document["figures"]["num_preemptions"] == 0 and document["limited_by"] == "decode"


def test_between_snapshots_only_gauges_are_read() -> None:
    server = Watched()
    server.tick()
    server.work(num_generated=5_000, num_prompt=1_000, num_running=100)
    assert server.tick(1.0)["outcome"] == "not enough evidence"
    server.work(num_running=201)
    server.tick(1.0)
    assert server.tick(SNAPSHOT_S)["figures"]["num_running"] == (0 + 100 + 201 + 201) / 4


def test_an_idle_server_is_not_judged_and_prints_nothing() -> None:
    server = Watched()
    server.work(num_generated=90_000, num_prompt=90_000, num_preemptions=900)
    server.tick()
    for _ in range(30):
        document = server.tick(SNAPSHOT_S)
    assert document["outcome"] == "not enough evidence" and "computed 0 tokens" in document["headline"]
    assert server.printed == []


def test_a_restart_of_the_engine_begins_a_new_window() -> None:
    server = Watched()
    server.tick()
    server.work(num_generated=5_000, num_prompt=1_000, num_running=200)
    server.metrics.restarted()
    assert "engine was restarted" in server.tick(SNAPSHOT_S)["headline"]
    server.work(num_generated=5_000, num_prompt=1_000, num_running=200)
    assert server.tick(SNAPSHOT_S)["limited_by"] == "decode"


def test_without_an_engine_the_document_stays_readable() -> None:
    server = Watched()
    server.has_engine = False
    server.tick()
    assert server.tick(SNAPSHOT_S)["outcome"] == "not enough evidence"


def test_the_gpu_is_the_first_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"name": "NVIDIA A100-SXM4-80GB", "uuid": "GPU-1"}, {"name": "NVIDIA H200", "uuid": "GPU-2"}, {"name": "X"}]
    monkeypatch.setattr("headrace.server.bottleneck.gpu_facts", lambda: gpus)
    for visible, name in (("0", "A100"), ("1", "H200"), ("GPU-2", "H200"), ("2", None), ("7", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = own_gpu()
        assert (found is None) == (name is None)
        assert found is None or found.name.startswith(name or "")


def test_the_document_needs_a_key_if_the_server_has_keys(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made, "/bottleneck", "GET")).status_code == 401
        answer = await ask(made, "/bottleneck", "GET", **{"x-api-key": "sesame"})
        assert (answer.status_code, answer.json()["schema"]) == (200, "headrace.doctor/1")

    with_server(engine, body, api_key="sesame")


@pytest.mark.slow
@pytest.mark.embedded
def test_the_real_server_names_its_full_slots_and_logs_it_with_its_load() -> None:
    """The embedded model with one slot: five requests wait while the first decodes."""
    now, printed = [0.0], list[str]()
    config = EngineConfig(model="smollm2", max_num_seqs=1, max_model_len=512)

    engine = AsyncEngine.over(lambda deliver: start_engine(config, deliver))

    async def body() -> None:
        options = ServerOptions(port=0, max_num_queued_reqs=8)
        keys = Keys(options, environ={}, print_line=lambda line: None)
        server = Server(
            engine,
            options,
            keys,
            model_name="smollm2",
            config=config,
            print_line=lambda line: None,
            load_log=LoadLog(lambda line, figures: printed.append(line)),
            clock=lambda: now[0],
        )
        listener = open_listener(options)
        exit = asyncio.create_task(server.lifecycle.run(listener))
        await until(lambda: server.lifecycle.is_started)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client:
                await _load_it(server, engine, client, now)
        finally:
            server.lifecycle.stop()
            await exit
            await engine.close()

    run(body)
    (line,) = printed
    assert "; limited by slots: " in line and "Try: raise max_num_seqs" in line
    assert f"generation throughput {120 / SNAPSHOT_S:.1f} tokens/s" in line


async def _load_it(server: Server, engine: AsyncEngine, client: httpx2.AsyncClient, now: list[float]) -> None:
    async def judged(seconds: float) -> dict[str, Any]:
        now[0] += seconds
        await server.bottleneck.tick()
        document: dict[str, Any] = (await client.get("/bottleneck")).json()
        return document

    assert (await judged(0.0))["outcome"] == "not enough evidence"
    assert "computed 0 tokens" in (await judged(SNAPSHOT_S))["headline"]
    await judged(WINDOW_S + SNAPSHOT_S)  # the next window begins here
    asked = {"prompt": "Count from one to a hundred in words:", "max_tokens": 20, "ignore_eos": True}
    tasks = [asyncio.create_task(client.post("/v1/completions", json=asked)) for _ in range(6)]
    while not all(task.done() for task in tasks):
        await server.bottleneck.tick()  # the clock stands still: this reads gauges, as it does once a second
        await asyncio.sleep(0.002)
    assert [task.result().status_code for task in tasks] == [200] * 6
    document = await judged(SNAPSHOT_S)
    assert document["limited_by"] == "slots"
    assert document["figures"]["output_tokens"] == 120
    assert document["figures"]["seconds"] == SNAPSHOT_S
    assert document["settings"]["gpu_memory_utilization"] == 0.5
    await judged(LINE_S)  # idle again: no second line
    for _ in range(4):
        document = await judged(SNAPSHOT_S)
    assert document["outcome"] == "not enough evidence"
