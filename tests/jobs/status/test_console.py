from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.core import EngineStats
from headrace.errors import JobError
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.planner import Planner
from headrace.jobs.status.console import Console, duration, plain_line
from headrace.jobs.status.meter import JobMeter, MeterFacts
from headrace.jobs.status.report import Tally
from headrace.jobs.store.status_file import (
    JobStatus,
    Saved,
    StatusFile,
    TokenRates,
    read_status,
    write_status,
)
from headrace.sched import SchedulerStats
from headrace.types import SamplingParams
from tests.jobs.conftest import settings_of

STATUS = JobStatus(
    state="running",
    output="out.jsonl",
    model="m",
    pid=1,
    started_at=100.0,
    updated_at=160.0,
    seconds=60.0,
    lines_total=1000,
    lines_done=250,
    lines_answered=248,
    lines_failed=2,
    lines_in_flight=16,
    lines_ready=700,
    errors={"invalid_json": 2},
    rates_now=TokenRates(prompt=1234.0, completion=567.0),
    rates_mean=TokenRates(prompt=1100.0, completion=520.0),
    prefix_hit_share=0.4,
    kv_use=0.8,
    sequences_running=8,
    sequences_waiting=8,
    saved=Saved(prefix_tokens=5000, duplicate_lines=3, duplicate_prompt_tokens=30, duplicate_completion_tokens=12),
    tokens_left=90_000,
    seconds_left=185.0,
    limited_by="prefill",
    limited_because="96% of computed tokens are of prompts",
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# status.json.


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", STATUS)
    assert read_status(tmp_path / "status.json") == STATUS
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_the_file_is_written_at_most_once_a_second_unless_it_has_to_be(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "out.jsonl.job" / "status.json"
    file = StatusFile(path, clock=clock)

    def written(done: int, **options: bool) -> int:
        file.write(dataclasses.replace(STATUS, lines_done=done), **options)
        return read_status(path).lines_done

    assert written(1) == 1
    clock.now = 0.9
    assert written(2) == 1
    assert written(3, now=True) == 3
    clock.now = 2.0
    assert written(4) == 4


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.job").write_text("in the way")
    file = StatusFile(tmp_path / "out.jsonl.job" / "status.json")
    file.write(STATUS)
    assert file.failure is not None


def test_a_file_that_is_no_status_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(JobError, match="is not the status of a job"):
        read_status(tmp_path / "status.json")
    with pytest.raises(JobError, match="cannot be read: No such file"):
        read_status(tmp_path / "missing.json")


# The console.


def test_a_line_has_rates_savings_errors_time_left_and_the_bottleneck() -> None:
    assert plain_line(STATUS) == (
        "250/1,000 lines, 3 min left · in 1,234 tok/s (mean 1,100) · out 567 tok/s (mean 520) · cache hits 40% · "
        "running 8, waiting 8, KV 80% · saved 5,000 tokens by prefixes, 42 tokens by duplicates (lines: 3) · "
        "errors invalid_json 2 · limited by prefill: 96% of computed tokens are of prompts"
    )
    early = dataclasses.replace(STATUS, lines_total=None, seconds_left=None, saved=Saved(), errors={}, limited_by=None)
    assert plain_line(early).startswith("250/? lines · in")
    assert plain_line(early).endswith("KV 80%")


def test_a_stream_that_is_no_terminal_gets_a_line_every_ten_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Console(stream=stream, clock=clock) as console:
        for second in range(26):
            clock.now = float(second)
            console.update(STATUS)
    assert stream.getvalue().splitlines() == [f"headrace: {plain_line(STATUS)}"] * 2


def test_a_disabled_console_writes_nothing() -> None:
    clock, stream = Clock(), io.StringIO()
    with Console(enabled=False, stream=stream, clock=clock) as console:
        clock.now = 100.0
        console.update(STATUS)
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_live_view_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Console(stream=terminal) as console:
        console.update(STATUS)
        console.update(dataclasses.replace(STATUS, lines_total=None, limited_by=None))
    text = terminal.getvalue()
    assert "250/1,000 lines, 3 min left" in text and "250/? lines" in text
    assert "limited by prefill: 96%" in text and "errors invalid_json 2" in text


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.4, 89, 100, 7000, 7300)] == ["0 s", "89 s", "2 min", "117 min", "2 h 02 min"]


# The meter.


def stats(**counts: Any) -> EngineStats:
    counts = {"num_blocks": 100, "block_size": 16, **counts}
    return EngineStats(SchedulerStats(**counts), host_seconds=0.01, wait_seconds=1.0)


def meter(clock: Clock, **facts: Any) -> JobMeter:
    given = {"output": "o", "model": "m", "settings": settings_of(EngineConfig()), **facts}
    return JobMeter(MeterFacts(**given), clock=clock)


def measure(meter: JobMeter, stats: EngineStats, planner: Planner, tally: Tally, **options: Any) -> JobStatus:
    given = {"num_total": None, "num_in_flight": 0, "has_ended": True, "writing_seconds": 0.0, **options}
    return meter.measure(stats, tally, planner, **given)


def planner_with(num_lines: int, *, max_tokens: int = 50) -> Planner:
    planner = Planner(settings_of(EngineConfig()).limits)
    for index in range(num_lines):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=None)
        planner.add(Work(PlainReply(index), params, np.arange(index, index + 10, dtype=np.int32).tobytes()))
    return planner


def output(num_tokens: int) -> LineOutput:
    return LineOutput(10, (LineAnswer(0, "", num_tokens, "length"),))


def test_rates_now_are_those_of_the_last_ten_seconds() -> None:
    clock, tally = Clock(), Tally()
    gauge, planner = meter(clock), planner_with(0)
    status = measure(gauge, stats(), planner, tally)
    assert status.rates_now == TokenRates()
    for second in range(1, 31):
        clock.now = float(second)
        num_tokens = second * 10 if second <= 20 else 200 + (second - 20) * 100
        status = measure(gauge, stats(num_generated_tokens=num_tokens, num_batched_tokens=num_tokens), planner, tally)
    assert status.rates_now.completion == pytest.approx(100)
    assert status.rates_mean.completion == pytest.approx(40)


def test_the_time_under_each_bottleneck_is_counted() -> None:
    clock, planner = Clock(), planner_with(0)
    gauge = meter(clock)
    measure(gauge, stats(), planner, Tally(), has_ended=False)
    for second in range(1, 7):
        clock.now = float(second)
        writing = 0.9 * second if second <= 4 else 0.0
        measure(gauge, stats(), planner, Tally(), has_ended=False, writing_seconds=writing)
    assert gauge.seconds_by_limit == {"reading": 2.0, "disk": 4.0}
    clock.now = 6.5
    status = measure(gauge, stats(), planner, Tally(), state="finished")
    assert gauge.seconds_by_limit == {"reading": 2.0, "disk": 4.0, "tail": 0.5}
    assert status.limited_by is status.limited_because is None


def test_time_left_follows_from_the_tokens_left() -> None:
    """Ten lines of 50 tokens; four are done, three run with 20 tokens each and one is queued; 100 tokens a second."""
    clock, tally = Clock(), Tally()
    gauge, planner = meter(clock), planner_with(10)
    planner.end_input()
    measure(gauge, stats(), planner, tally, num_total=10)
    taken = [planner.take() for _ in range(8)]
    for line in taken[:4]:
        planner.finished(line.reply.index, output(50))
        tally.add_answer(line, output(50))
    clock.now = 2.6
    counts = {"num_steps": 100, "num_generated_tokens": 260, "num_batched_tokens": 260, "num_running": 3}
    status = measure(gauge, stats(**counts, num_prompt_tokens=70), planner, tally, num_total=10)
    # Two that wait: 100 to decode and 20 prompt tokens; four in flight: 200 less 60, and 10 of the queued one's prompt.
    assert status.tokens_left == 270
    assert status.seconds_left == pytest.approx(2.7)


def test_unread_lines_are_estimated_from_those_so_far() -> None:
    clock, tally = Clock(), Tally()
    gauge, planner = meter(clock), planner_with(2)
    measure(gauge, stats(), planner, tally, num_total=102, has_ended=False)
    for _ in range(2):
        line = planner.take()
        planner.finished(line.reply.index, output(50))
        tally.add_answer(line, output(50))
    clock.now = 1.0
    done = stats(num_steps=50, num_generated_tokens=100, num_batched_tokens=120)
    status = measure(gauge, done, planner, tally, num_total=102, has_ended=False)
    assert status.tokens_left == 100 * 60
    assert status.seconds_left == pytest.approx(50.0, rel=0.01)


def test_without_a_known_number_of_lines_there_is_no_time_left() -> None:
    gauge = meter(Clock())
    assert measure(gauge, stats(), planner_with(3), Tally(), num_total=None).seconds_left is None


def test_the_cost_of_a_gpu_includes_loading() -> None:
    clock = Clock()
    on_gpu = dataclasses.replace(settings_of(EngineConfig()), device="cuda")
    gauge = meter(clock, settings=on_gpu, start_seconds=600.0, gpu_price=6.0)
    clock.now = 1200.0
    status = measure(gauge, stats(), planner_with(0), Tally(), state="finished")
    assert (status.gpu_seconds, status.cost) == (1800.0, 3.0)
    assert measure(meter(clock), stats(), planner_with(0), Tally()).gpu_seconds is None


def test_a_running_job_has_a_bottleneck_and_a_finished_one_has_none() -> None:
    gauge = meter(Clock())
    waiting = measure(gauge, stats(), planner_with(0), Tally(), has_ended=False)
    assert waiting.limited_by == "reading"
    assert measure(gauge, stats(), planner_with(0), Tally(), state="finished").limited_by is None


def test_a_stream_that_has_gone_does_not_end_a_job() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(stream=Broken())
    with console:
        console.tell("loading m ...")
        console.write("stopping")
        console.update(STATUS)
