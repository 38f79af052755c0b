"""GET /alerts: Prometheus' format, the state of every alert, and its key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.monitor.alerts import ALERTS
from tests.server.endpoints.test_admin import ask
from tests.server.serving import Server
from tests.server.whole_server import LimitedEngine, Running, with_server


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


def test_every_alert_has_a_state(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await made.complete()).status_code == 200
        for _ in range(2):
            made.server.self_monitor.sample()
        told = (await ask(made, "/alerts", "GET")).json()
        assert told["status"] == "success"
        assert told["data"] == {"alerts": []}
        states = {state["name"]: state for state in told["states"]}
        assert list(states) == [alert.name for alert in ALERTS]
        assert states["KvCacheNearlyFull"]["state"] == "ok"
        assert states["KvCacheNearlyFull"]["value"] == 0.0
        assert states["KvCacheNearlyFull"]["threshold"] == 0.9
        assert states["QueueNearlyFull"]["state"] == "ok"
        assert states["TimeToFirstTokenHigh"]["state"] == "unknown"
        assert "needs 200 requests" in states["TimeToFirstTokenHigh"]["note"]
        assert told["history"]["num_samples"] == 2

    with_server(engine, body)


def test_an_active_alert_has_the_format_of_prometheus(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        made.server.self_monitor.sample()
        made.server.metrics.restarted()
        made.server.self_monitor.sample()
        told = (await ask(made, "/alerts", "GET")).json()
        (alert,) = told["data"]["alerts"]
        assert alert.keys() == {"labels", "annotations", "state", "activeAt", "value"}
        assert alert["labels"] == {
            "alertname": "HeadraceEngineRestarted",
            "severity": "warning",
            "model_name": "tiny",
        }
        assert alert["state"] == "firing"
        assert alert["annotations"]["summary"] == "engine restarts in 10 min: 1; threshold: 0"
        assert float(alert["value"]) == 1.0
        assert alert["activeAt"].endswith("+00:00")
        assert [line for line in made.printed if line.startswith("alert firing: EngineRestarted")]

    with_server(engine, body)


def test_it_needs_a_key_if_the_server_has_keys(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made, "/alerts", "GET")).status_code == 401
        assert (await ask(made, "/alerts", "GET", **{"x-api-key": "sesame"})).status_code == 200

    with_server(engine, body, api_key="sesame")


def test_a_server_that_does_not_watch_itself_says_so(server: Server) -> None:
    assert server.get("/alerts").status_code == 503
