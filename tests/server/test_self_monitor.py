"""The server's view of itself: samples, log lines, and counters across an engine restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.core import EngineStats
from headrace.monitor import ServerMetrics
from headrace.monitor.history import SPAN_S
from headrace.monitor.table import GENERATING_HANDLERS
from headrace.sched import SchedulerStats
from headrace.server.endpoints import ROUTES
from headrace.server.self_monitor import COLUMNS, SelfMonitor


class Watched:
    """A monitor over real metrics and an engine that a test sets; ten seconds pass between two samples."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics("m")
        self.stats: EngineStats | None = EngineStats(SchedulerStats(num_blocks=100), 0.0, 0.0, started_at=1.0)
        self.now = 0.0
        self.printed: list[str] = []
        self.monitor = SelfMonitor(
            self.metrics,
            lambda: self.metrics.observe(self.stats),
            print_line=self.printed.append,
            clock=lambda: self.now,
            wall_clock=lambda: 1e9 + self.now,
        )

    def engine(self, *, started_at: float = 1.0, **scheduler: int) -> None:
        assert self.stats is not None
        made = replace(self.stats.scheduler, **scheduler)
        self.stats = replace(self.stats, scheduler=made, started_at=started_at)

    def pass_time(self, num_samples: int) -> None:
        for _ in range(num_samples):
            self.monitor.sample()
            self.now += 10.0

    def shown(self) -> dict[str, Any]:
        return self.monitor.history.table(COLUMNS)

    def state(self, name: str) -> str:
        return next(status.state for status in self.monitor.alerts.statuses if status.alert.name == name)


def test_an_hour_is_kept_in_one_megabyte() -> None:
    watched = Watched()
    watched.pass_time(1000)
    assert watched.monitor.history.seconds >= SPAN_S
    assert watched.monitor.history.num_bytes < 1.5e6
    assert len(watched.shown()["time"]) == 361


def test_the_history_has_rates_and_gauges() -> None:
    watched = Watched()
    for step in range(3):
        watched.engine(num_steps=step, num_generated_tokens=500 * step, num_running=step, num_blocks_held=10 * step)
        watched.metrics.refused("queue_full")
        watched.pass_time(1)
    shown = watched.shown()
    assert shown["generation_tokens_per_s"] == [None, 50.0, 50.0]
    assert shown["num_running"] == [0, 1, 2]
    assert shown["kv_use"] == pytest.approx([0.0, 0.1, 0.2])
    assert shown["refused_per_s"] == [None, 0.1, 0.1]
    assert shown["ttft_p95_s"] == [None, None, None]


def test_a_restarted_engine_counts_from_zero_and_no_rate_is_wrong() -> None:
    watched = Watched()
    watched.engine(num_steps=100, num_generated_tokens=10_000)
    watched.pass_time(2)
    watched.stats = None
    watched.pass_time(1)
    watched.stats = EngineStats(
        SchedulerStats(num_blocks=100, num_steps=1, num_generated_tokens=70), 0, 0, started_at=9
    )
    watched.pass_time(2)
    assert watched.shown()["generation_tokens_per_s"] == [None, 0.0, 0.0, 7.0, 0.0]
    assert watched.shown()["num_running"] == [0, 0, None, 0, 0]


def test_alerts_are_printed_when_they_start_and_when_they_end() -> None:
    watched = Watched()
    watched.engine(num_blocks_held=95)
    watched.pass_time(31)
    assert watched.state("KvCacheNearlyFull") == "firing"
    (line,) = watched.printed
    assert line.startswith("alert firing: KvCacheNearlyFull")
    watched.pass_time(60)
    assert len(watched.printed) == 1
    watched.engine(num_blocks_held=10)
    watched.pass_time(10)
    assert len(watched.printed) == 2
    assert watched.printed[1].startswith("alert resolved: KvCacheNearlyFull")


def test_a_fresh_idle_server_has_no_active_alert() -> None:
    watched = Watched()
    watched.pass_time(100)
    states = {status.alert.name: status.state for status in watched.monitor.alerts.statuses}
    unknown = {name for name, state in states.items() if state == "unknown"}
    assert unknown == {
        *("QueueNearlyFull", "OldestRequestWaiting"),  # their gauges are not set in this test
        *("TimeToFirstTokenHigh", "InterTokenLatencyHigh", "EndToEndLatencyHigh"),
    }
    assert {state for name, state in states.items() if name not in unknown} == {"ok"}
    assert watched.printed == []


def test_an_engine_that_is_down_fires() -> None:
    watched = Watched()
    watched.stats = None
    watched.pass_time(7)
    assert watched.state("EngineDown") == "firing"
    assert watched.state("KvCacheNearlyFull") == "unknown"


def test_the_task_samples_until_it_is_cancelled() -> None:
    watched = Watched()

    async def body() -> asyncio.Task[None]:
        with watched.monitor.running(interval_s=0.0) as task:
            while len(watched.monitor.history) < 3 and not task.done():
                await asyncio.sleep(0)
        await asyncio.wait([task])
        return task

    assert asyncio.run(body()).cancelled()
    assert len(watched.monitor.history) >= 3
    assert watched.printed == []


def test_a_failure_of_the_task_is_reported() -> None:
    watched = Watched()

    def refresh() -> None:
        raise RuntimeError("broken")

    watched.monitor._refresh = refresh

    async def body() -> None:
        with watched.monitor.running() as task:
            await asyncio.wait([task])

    asyncio.run(body())
    assert watched.printed == ["the server no longer watches itself: RuntimeError: broken"]


def test_the_handlers_of_error_counts_are_the_routes_that_run_the_model() -> None:
    assert set(GENERATING_HANDLERS) == {route.path for route in ROUTES if route.generates}
