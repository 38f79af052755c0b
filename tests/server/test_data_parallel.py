"""One server over two engines, each in a process of its own, on a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.process.supervisor import Supervision
from headrace.engine.restart_policy import SUPERVISOR_RESTARTS
from headrace.engine.start import start_engine_group
from tests.engine.process.process_tools import wait_until
from tests.server.batch.batch_server import create, line, results, serving_batches, wait_for
from tests.server.live import TEST_TIMEOUT_S, until
from tests.server.whole_server import Running, with_server

pytestmark = pytest.mark.processes

PROMPTS = ["hello there", "abcdef " * 6, "the quick brown fox", "1 2 3 4 5 6 7 8", "z" * 40, "to be or not to be"]
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def config_of(directory: Path) -> EngineConfig:
    return EngineConfig(
        model=str(directory), max_num_seqs=4, num_gpu_blocks_override=128, scheduling_policy="priority", num_threads=1
    )


def start(directory: Path) -> AsyncEngine:
    restarts = replace(SUPERVISOR_RESTARTS, first_delay_s=0.01)
    rules = Supervision(step_timeout_s=TEST_TIMEOUT_S, restarts=restarts, check_s=0.01)
    return AsyncEngine.over_group(partial(start_engine_group, config_of(directory), size=2, supervision=rules))


@pytest.fixture(scope="module")
def engines(tiny_directory: Path) -> Iterator[AsyncEngine]:
    made = start(tiny_directory)
    yield made
    asyncio.run(made.close())


async def page(made: Running) -> str:
    return (await made.client.get("/metrics")).text


async def values(made: Running, name: str) -> list[float]:
    """The value of a series of each engine."""
    found = [line for line in (await page(made)).split("\n") if line.startswith(f"{name}{{")]
    return [float(line.rsplit(" ", 1)[1]) for line in sorted(found)]


def test_answers_are_those_of_one_engine(engines: AsyncEngine, tiny_directory: Path) -> None:
    answers: dict[str, list[Any]] = {}

    async def body(made: Running) -> None:
        asked = [made.complete(prompt=prompt, n=2, seed=3, **GREEDY) for prompt in PROMPTS]
        asked.append(made.complete(prompt=PROMPTS, **GREEDY))  # one request of several prompts
        asked.append(made.complete(prompt="x", temperature=0.0, structured_outputs={"regex": "[ab]{4}"}))
        asked.append(made.client.post("/v1/embeddings", json={"input": PROMPTS}))
        done = await asyncio.gather(*asked)
        assert [answer.status_code for answer in done] == [200] * len(done), [answer.text for answer in done]
        texts = [[choice["text"] for choice in answer.json()["choices"]] for answer in done[:-1]]
        vectors = [one["embedding"] for one in done[-1].json()["data"]]
        answers[f"{made.engine.num_engines} engines"] = [texts, vectors]
        if made.engine.num_engines == 2:
            assert all(await values(made, "headrace:steps_total")), "both have worked"

    with_server(engines, body)
    alone = AsyncEngine(str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=128, num_threads=1)
    with_server(alone, body)
    asyncio.run(alone.close())
    (texts, vectors), (same, near) = answers.values()
    assert texts == same
    assert [pytest.approx(vector, abs=1e-5) for vector in vectors] == near


def test_prompts_with_a_common_prefix_go_to_the_engine_that_has_it(engines: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        names = ("headrace:prefix_cache_hits_total", "headrace:prefix_cache_queries_total")
        hits, asked = [await values(made, name) for name in names]
        for number in range(8):
            assert (await made.complete(prompt="a common prefix of many words " * 8 + str(number))).status_code == 200
        hits_now, asked_now = [await values(made, name) for name in names]
        grown = [after - before for before, after in zip(asked, asked_now, strict=True)]
        assert min(grown) == 0, "one engine got all of them"
        assert sum(hits_now) - sum(hits) > 0.8 * 7 / 8 * max(grown)

    with_server(engines, body)


def test_a_killed_engine_costs_its_own_streams_only(engines: AsyncEngine) -> None:
    asked = {**GREEDY, "max_tokens": 300, "stream": True}

    async def body(made: Running) -> None:
        async with AsyncExitStack() as stack:
            streams = []
            for number in range(8):  # one after the other: each goes to the engine with less to do
                stream = made.client.stream("POST", "/v1/completions", json={**asked, "prompt": f"{number}" * 50})
                lines = (await stack.enter_async_context(stream)).aiter_lines()
                assert (await anext(lines)).startswith("data: {")
                streams.append(lines)
            lost = [engines.engine_of(request_id) == 1 for request_id in engines._events.readers]
            assert 0 < sum(lost) < 8
            pid = engines.states[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            ends = await asyncio.gather(*map(last_events, streams))
            assert ['"code":"engine_dead"' in end for end in ends] == lost
            assert all(
                '"finish_reason":"length"' in end for end, is_lost in zip(ends, lost, strict=True) if not is_lost
            )
        for path in ("/ready", "/health"):
            assert (await made.client.get(path)).status_code == 200
        assert (await made.complete()).status_code == 200
        await until(lambda: engines.states[1].phase == "ready")
        assert await values(made, "headrace:engine_restarts_total") == [0.0, 1.0]
        assert await values(made, "headrace:engine_up") == [1.0, 1.0]
        assert made.server.queue.num_in_flight == 0

    with_server(engines, body)


async def last_events(lines: AsyncIterator[str]) -> str:
    """The last events of a stream before its [DONE]."""
    found = [line async for line in lines if line]
    assert found[-1] == "data: [DONE]"
    return "".join(found[-3:-1])


def test_a_client_that_leaves_and_a_deadline_end_the_request_on_its_engine(engines: AsyncEngine) -> None:
    endless = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}

    async def body(made: Running) -> None:
        async with made.client.stream("POST", "/v1/completions", json={**endless, "stream": True}) as stream:
            assert (await anext(stream.aiter_lines())).startswith("data: {")
        late = await made.complete(headers={"X-Request-Timeout": "0.05"}, **endless)
        assert late.status_code in (408, 504), late.text
        await until(lambda: engines.stats.scheduler.num_running == 0)
        assert not engines._events.readers
        assert made.server.queue.limits.max_num_seqs == 8

    with_server(engines, body)


def test_info_names_each_engine_and_a_profile_is_of_one(engines: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        info = (await made.client.get("/server_info")).json()
        assert [engine["phase"] for engine in info["engines"]] == ["ready", "ready"]
        assert info["settings"]["data_parallel_size"]["value"] == 1  # the engines are given here, not the option
        wrong = await made.client.post("/start_profile", json={"engine": 2})
        assert wrong.status_code == 400 and "engine must be below 2" in wrong.text
        started = await made.client.post("/start_profile", json={"engine": 1})
        assert started.status_code == 200, started.text
        assert (await made.complete(prompt=PROMPTS)).status_code == 200
        stopped = await made.client.post("/stop_profile", json={"analyse": False})
        assert stopped.status_code == 200, stopped.text

    with_server(engines, body, profiler_dir=str(tmp_path))


@pytest.mark.slow
def test_a_batch_runs_on_both_engines_and_survives_the_death_of_one(tiny_directory: Path, tmp_path: Path) -> None:
    engine, config = start(tiny_directory), config_of(tiny_directory)
    lines = [line(str(number), max_tokens=40, ignore_eos=True) for number in range(60)]
    try:
        with serving_batches(engine, config, tmp_path) as server, server.client() as client:
            batch = create(client, lines)
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)  # type: ignore[union-attr]
            pid = engine.states[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            batch = wait_for(client, batch.id, "completed", "failed")
            assert batch.status == "completed" and batch.request_counts.completed == 60
            assert results(client, batch.output_file_id).keys() == {each["custom_id"] for each in lines}
            other = engine.states[1].stats
            assert other is not None and other.scheduler.num_generated_tokens > 0
    finally:
        asyncio.run(engine.close())
