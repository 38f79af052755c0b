"""GET / and GET /dashboard/data without a browser: headers, what the page may load, figures, new samples only, keys."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.hardware.gpu_monitor import GpuFigures
from headrace.hardware.nvml import GpuSample
from headrace.server.self_monitor import COLUMNS, LIVE_COLUMNS
from tests.server.endpoints.test_admin import ask
from tests.server.serving import Server
from tests.server.whole_server import LimitedEngine, Running, with_server

DATA = "/dashboard/data"
MAX_PAGE_BYTES = 80_000
MAX_HOUR_BYTES = 60_000
MAX_POLL_BYTES = 2_000


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


async def data(made: Running, since: int = 0) -> dict[str, Any]:
    answer = await ask(made, f"{DATA}?since={since}", "GET")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_page_may_load_and_run_nothing_else(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        answer = await ask(made, "/", "GET")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy["script-src"])
        assert re.fullmatch(r"'sha256-[\w+/=]{44}'", policy["style-src"])
        assert len(answer.content) < MAX_PAGE_BYTES

    with_server(engine, body)


def test_the_page_names_no_outside_address_and_has_no_data(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        page = (await ask(made, "/", "GET")).text
        assert set(re.findall(r"(?:https?:)?//[\w.]+[^\s\"']*", page)) <= {"http://www.w3.org/2000/svg"}  # a name
        assert not re.search(r"(?:src|href|action)=(?!\"data:,\")", page)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page)
        assert not re.search(r"\son\w+=|javascript:|style=", page)
        assert "tiny" not in page

    with_server(engine, body)


def test_the_figures_of_this_moment_are_those_of_the_requests(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        made.server.self_monitor.sample()
        for _ in range(3):
            assert (await made.complete(max_tokens=8, ignore_eos=True)).status_code == 200
        found = await data(made)
        live = found["live"]
        assert live.keys() == LIVE_COLUMNS.keys()
        assert live["num_running"] == live["num_waiting"] == live["refused_per_s"] == live["errors_per_s"] == 0
        for name in ("generation_tokens_per_s", "prompt_tokens_per_s", "finished_per_s", "itl_p50_s"):
            assert live[name] > 0, name
        assert 0 < live["ttft_p50_s"] <= live["ttft_p95_s"]
        assert live["e2e_p95_s"] > 0  # of other buckets than the time to first token, so that they do not compare
        assert 0 < live["prefix_hit_share"] < 1  # the same prompt three times
        assert (found["model"], found["state"]) == ("tiny", "ready")
        assert found["gpu"] == {"source": "none", "missing": "the engine runs on the CPU", "gpus": []}

    with_server(engine, body)


def test_before_the_first_sample_rates_are_unknown(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        found = await data(made)
        assert found["live"]["finished_per_s"] is None and found["live"]["ttft_p50_s"] is None
        assert found["live"]["num_running"] == 0
        assert found["history"]["next"] == 0
        assert found["history"]["columns"] == {name: [] for name in ("time", *COLUMNS)}

    with_server(engine, body)


def test_only_new_samples_are_sent(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        for _ in range(3):
            made.server.self_monitor.sample()
        first = await data(made)
        assert first["history"]["next"] == 3
        assert {len(values) for values in first["history"]["columns"].values()} == {3}
        made.server.self_monitor.sample()
        second = await data(made, since=3)
        assert second["history"]["next"] == 4
        assert {len(values) for values in second["history"]["columns"].values()} == {1}
        assert first["server"] == second["server"]
        after_restart = await data(made, since=1000)  # a page that was open before
        assert after_restart["history"] == {**second["history"], "columns": {n: [] for n in ("time", *COLUMNS)}}

    with_server(engine, body)


@pytest.mark.parametrize("since", ["-1", "1.5", "x", "٣", "9" * 16])
def test_a_number_of_samples_that_is_none_is_refused(engine: AsyncEngine, since: str) -> None:
    async def body(made: Running) -> None:
        answer = await ask(made, f"{DATA}?since={since}", "GET")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "since"

    with_server(engine, body)


def test_an_hour_is_small_and_a_poll_is_smaller(engine: AsyncEngine) -> None:
    now = [0.0]

    async def body(made: Running) -> None:
        monitor = made.server.self_monitor
        monitor._clock = lambda: now[0]
        for _ in range(400):
            now[0] += 10.0
            made.server.metrics.first_token(now[0] / 1234)
            made.server.metrics.refused("queue_full")
            monitor.sample()
        hour = await ask(made, DATA, "GET")
        assert len(hour.json()["history"]["columns"]["time"]) == 361
        assert len(hour.content) < MAX_HOUR_BYTES
        poll = await ask(made, f"{DATA}?since={hour.json()['history']['next'] - 1}", "GET")
        assert len(poll.json()["history"]["columns"]["time"]) == 1
        assert len(poll.content) < MAX_POLL_BYTES

    with_server(engine, body)


def test_gpu_figures_are_shown_and_unknown_ones_are_null(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        sample = GpuSample(0.0, 1, "GPU-1", "NVIDIA <b>H200</b>", utilization=0.5, memory_bytes=2.0**30)
        made.server.gpus.now = lambda: GpuFigures((sample,), "nvml")  # type: ignore[method-assign]
        found = (await data(made))["gpu"]
        assert (found["source"], found["missing"]) == ("nvml", "")
        (gpu,) = found["gpus"]
        assert (gpu["index"], gpu["name"]) == (1, "NVIDIA <b>H200</b>")
        assert (gpu["utilization"], gpu["memory_bytes"], gpu["power_w"]) == (0.5, 2**30, None)

    with_server(engine, body)


def test_with_keys_the_page_needs_none_and_its_figures_do(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made, "/", "GET")).status_code == 200
        assert (await ask(made, "/", "HEAD")).status_code == 200
        assert (await ask(made, "/", "POST")).status_code == 405
        assert (await ask(made, DATA, "GET")).status_code == 401
        assert (await ask(made, f"{DATA}?key=sesame", "GET")).status_code == 401
        assert (await ask(made, DATA, "GET", authorization="Bearer sesame")).status_code == 200

    with_server(engine, body, api_key="sesame")


def test_a_server_that_does_not_watch_itself_says_so(server: Server) -> None:
    assert server.get("/").status_code == 200
    assert server.get(DATA).status_code == 503


def test_every_figure_of_the_page_is_in_the_data() -> None:
    page = Path(__file__).parents[3] / "src/headrace/server/page"
    cards = (page / "cards.js").read_text()
    shown = set(re.findall(r'key: "(\w+)"', cards)) | set(re.findall(r"live\.(\w+)", cards))
    names = json.loads("[" + ",".join(re.findall(r'\["(?:ttft|itl|e2e)"', cards)).replace("[", "") + "]")
    shown |= {f"{name}_{percentile}_s" for name in names for percentile in ("p50", "p95")}
    assert {"ttft_p95_s", "kv_use", "queue_use"} <= shown
    assert shown <= LIVE_COLUMNS.keys()
