"""The line of a minute: when it is written, what it says, and that an idle server is silent."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.monitor import ServerMetrics
from headrace.sched import SchedulerStats
from headrace.server.load_log import LINE_S, REPEAT_S, LoadLog
from tests.doctor.builders import live

SNAPSHOT_S = 10.0

FULL = diagnose(live(num_preemptions=90.0, recomputed_tokens=9_000.0))
FULLER = diagnose(live(num_preemptions=180.0, recomputed_tokens=18_000.0))
DECODE = diagnose(live())
NO_LOAD: dict[str, Any] = {"output_tokens": 0.0, "prompt_tokens": 0.0, "num_running": 0.0}
IDLE_AND_WRONG = diagnose(live(**NO_LOAD, settings={"gpu_memory_utilization": 0.99}))
ADVICE = "; limited by cache: the KV cache is full and sequences are preempted. Try: "


class Logged:
    """A server without HTTP whose load and time a test decides. `lines` has (time, line), `figures` those of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []
        self.figures: list[dict[str, Any]] = []
        self.metrics = ServerMetrics("m", fake_settings())
        self.state = SchedulerStats(num_blocks=1000, block_size=16)
        self._log = LoadLog(self._write)
        self.snapshot(0.0)

    def work(self, *, num_prompt: int = 0, num_output: int = 0, num_hit: int = 0, **gauges: Any) -> None:
        before = self.state
        self.state = replace(
            before,
            num_steps=before.num_steps + 1,
            num_prompt_tokens=before.num_prompt_tokens + num_prompt,
            num_prefix_queried_tokens=before.num_prefix_queried_tokens + num_prompt,
            num_prefix_hit_tokens=before.num_prefix_hit_tokens + num_hit,
            num_generated_tokens=before.num_generated_tokens + num_output,
            **gauges,
        )

    def snapshot(self, seconds: float = SNAPSHOT_S, diagnosis: Diagnosis | None = None) -> None:
        self.now += seconds
        self.metrics.observe(EngineStats(self.state, 0.0, 0.0, started_at=1.0))
        self._log.see(self.state)
        self._log.take(self.metrics.copy(), diagnosis, self.now)

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.lines]

    def _write(self, line: str, figures: Any) -> None:
        self.lines.append((self.now, line))
        self.figures.append(dict(figures))


def test_the_first_line_comes_with_the_first_work_and_then_one_a_minute() -> None:
    server = Logged()
    for _ in range(12):
        server.snapshot()
    for _ in range(30):
        server.work(num_output=100, num_running=2)
        server.snapshot()
    assert server.times == [130.0, 190.0, 250.0, 310.0, 370.0]


def test_a_line_has_the_figures_of_its_period() -> None:
    server = Logged()
    server.work(num_prompt=400, num_hit=100, num_output=1000, num_running=3, num_waiting=7, num_blocks_held=412)
    server.snapshot(SNAPSHOT_S, FULL)
    ((_, line),) = server.lines
    assert line.startswith(
        "last 10 s: prompt throughput 40.0 tokens/s, generation throughput 100.0 tokens/s, running 3 reqs, "
        "waiting 7 reqs, refused 0 reqs, KV cache usage 41.2%, prefix cache hit rate 25.0%" + ADVICE
    )
    assert server.figures == [
        {
            "interval_s": 10.0,
            "prompt_tokens_per_s": 40.0,
            "output_tokens_per_s": 100.0,
            "num_running": 3.0,
            "num_waiting": 7.0,
            "kv_cache_usage": 0.412,
            "num_refused": 0,
            "refused": {},
            "prefix_cache_hit_rate": 0.25,
            "limited_by": "cache",
            "is_idle": False,
        }
    ]


def test_a_period_of_a_minute_has_means_and_the_highest_cache_use() -> None:
    server = Logged()
    server.work(num_output=1, num_running=1)
    server.snapshot()
    for number in range(1, 7):
        server.work(num_output=60, num_running=number, num_blocks_held=100 * number if number < 4 else 50)
        server.snapshot()
    line = server.lines[-1][1]
    assert line.startswith("last 60 s: ") and "generation throughput 6.0 tokens/s" in line
    assert "running 3.5 reqs" in line and "KV cache usage 30.0%" in line


def test_refusals_are_counted_by_reason_once_a_line() -> None:
    server = Logged()
    for reason in ("queue_full", "queue_full", "auth"):
        server.metrics.refused(reason)
    server.snapshot()
    assert "refused 3 reqs (1 auth, 2 queue_full)" in server.lines[0][1]
    server.metrics.refused("queue_full")
    for _ in range(6):
        server.snapshot()
    assert [each["refused"] for each in server.figures] == [{"auth": 1, "queue_full": 2}, {"queue_full": 1}]


def test_an_idle_server_writes_nothing_more_than_that_it_is_idle() -> None:
    server = Logged()
    server.work(num_output=100, num_running=1)
    server.snapshot()
    server.work(num_output=100, num_running=0)
    for _ in range(60):
        server.snapshot()
    assert server.times == [10.0, 70.0]
    assert server.lines[-1][1].endswith("; idle now") and server.figures[-1]["is_idle"]


def test_rare_requests_write_at_most_one_line_a_minute() -> None:
    server = Logged()
    for _ in range(20):
        server.work(num_output=10)
        server.snapshot(25.0)
    assert all(later - earlier >= LINE_S for earlier, later in zip(server.times, server.times[1:], strict=False))
    assert len(server.lines) == 7


def test_a_stuck_engine_is_no_idle_one() -> None:
    """No counter grows, but sequences run."""
    server = Logged()
    server.work(num_output=10, num_running=4)
    for _ in range(13):
        server.snapshot()
    assert server.times == [10.0, 70.0, 130.0]
    assert "generation throughput 0.0 tokens/s, running 4 reqs" in server.lines[-1][1]
    assert not server.figures[-1]["is_idle"]


def test_without_an_engine_the_line_says_so() -> None:
    lines: list[str] = []
    metrics, log = ServerMetrics("m", fake_settings()), LoadLog(lambda line, figures: lines.append(line))
    for now in (0.0, SNAPSHOT_S):
        log.see(None)
        log.take(metrics.copy(), None, now)
        metrics.refused("engine_dead")
    log.take(metrics.copy(), None, 2 * SNAPSHOT_S)
    assert "refused 1 reqs (1 engine_dead), no engine responds" in lines[0]


@pytest.mark.parametrize(
    ("diagnoses", "endings"),
    [
        ([FULL, FULLER, FULL], ["advice", "; limited by cache", "; limited by cache"]),  # other numbers are no change
        ([FULL, DECODE, FULL], ["advice", "; limited by decode: ", "advice"]),
        ([IDLE_AND_WRONG], [""]),
        ([FULL] * 11, ["advice"] + ["; limited by cache"] * 9 + ["advice"]),  # again after ten minutes
    ],
)
def test_advice_is_written_when_it_is_new_and_every_ten_minutes(diagnoses: list[Diagnosis], endings: list[str]) -> None:
    assert REPEAT_S == 10 * LINE_S
    server = Logged()
    for diagnosis in diagnoses:
        server.work(num_output=1000, num_running=1)
        server.snapshot(LINE_S, diagnosis)
    for (_, line), ending in zip(server.lines, endings, strict=True):
        said = line.partition("KV cache usage 0.0%")[2]
        if ending == "advice":
            assert said.startswith(ADVICE)
        else:
            assert said.startswith(ending) and "Try: " not in said


def test_lines_go_to_the_log_with_their_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.load")
    metrics, log = ServerMetrics("m", fake_settings()), LoadLog()
    log.take(metrics.copy(), None, 0.0)
    metrics.refused("auth")
    log.see(SchedulerStats(num_blocks=10, block_size=16))
    log.take(metrics.copy(), None, SNAPSHOT_S)
    (record,) = caplog.records
    assert record.message.startswith("last 10 s: ")
    assert record.__dict__["num_refused"] == 1 and record.__dict__["refused"] == {"auth": 1}
