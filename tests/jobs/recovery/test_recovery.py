"""Jobs whose engine fails: requests that end in errors, engines that die, lines that kill them, out of memory."""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import JobError, ModelError, ResumableJobError
from headrace.jobs.input import prepare_process
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.summary import plain_summary
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, Retry, read_entries
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.status_file import read_status
from tests.jobs.faults import AT_ONCE, FaultyRunner, FaultyStart
from tests.jobs.recovery.failing_jobs import Start, WriteLines, directory_of, prompts, read, run

# Requests that end in an error.


def test_a_line_that_fails_is_retried_and_counted(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(20))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3", "3", "7"])
    report = run(source, faulty)
    assert (report.exit_code, report.tally.num_answered) == (0, 20)
    assert report.failures.retries == {"engine_error": 3}
    assert Counter(faulty.submitted[0])["3"] == 3
    assert read_status(directory_of(source) / "status.json").retries == {"engine_error": 3}
    assert view_job(directory_of(source)).as_json()["trouble"]["retries"] == {"engine_error": 3}
    assert "retries       engine_error 3" in plain_summary(report)
    clean = run(write_lines(*prompts(20)), start, overwrite=True)
    assert clean.failures.retries == {}, "--overwrite computes all lines again"


def test_a_line_that_fails_five_times_becomes_an_error_line(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(8))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3"] * 9)
    report = run(source, faulty)
    assert Counter(faulty.submitted[0])["3"] == 5
    assert (report.exit_code, dict(report.tally.errors)) == (3, {"engine_error": 1})
    assert "sampling is broken (tried 5 times)" in read(source)[3]["error"]["message"]


def test_the_count_of_attempts_survives_the_process(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(8))
    broken = FaultyStart(start, FaultyRunner(dies_at={3}, error=lambda: RuntimeError("CUDA error: gone")))
    with pytest.raises(ResumableJobError):
        run(source, broken)
    log = FailureLog(directory_of(source) / "trouble.jsonl", epoch=1)
    for _ in range(3):
        log.append(Retry(3, "engine_error"))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3"] * 9)
    report = run(source, faulty)
    assert Counter(faulty.submitted[0])["3"] == 2, "three were made before"
    assert report.tally.errors["engine_error"] == 1
    again = FaultyStart(start, FaultyRunner(), fails=["3"])
    assert run(source, again, redo="error").exit_code == 0
    assert Counter(again.submitted[0])["3"] == 2, "a redo counts from zero"


def test_an_invalid_request_is_never_retried(write_lines: WriteLines, start: Start) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    source = write_lines({"prompt": "x" * 600}, "{broken", {"prompt": "a", **form}, *prompts(3))
    faulty = FaultyStart(start, FaultyRunner(), fails=["2"])
    report = run(source, faulty, max_error_rate=1)
    assert report.tally.num_failed == 3
    assert Counter(faulty.submitted[0])["2"] == 1
    assert report.failures.retries == {}


# Engines that die.


def test_a_dead_engine_is_restarted_and_its_lines_run_again(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    run(source, start)
    expected = read(source)
    faulty = FaultyStart(start, FaultyRunner(dies_at={5, 17}))
    report = run(source, faulty, overwrite=True)
    assert (report.exit_code, report.tally.num_answered, len(faulty.configs)) == (0, 40, 3)
    assert report.failures.deaths == {"engine": 2}
    assert {index: line["text"] for index, line in read(source).items()} == {
        index: line["text"] for index, line in expected.items()
    }
    assert report.stats.scheduler.num_finished == 40, "the counts of all engines"
    status = read_status(directory_of(source) / "status.json")
    assert (status.state, status.engine_deaths) == ("finished", {"engine": 2})


def test_deaths_are_logged_with_the_lines_in_flight(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(6))
    faulty = FaultyStart(start, FaultyRunner(dies_at={2}))
    run(source, faulty)
    (death,) = (line.event for line in read_entries(directory_of(source) / "trouble.jsonl"))
    assert isinstance(death, EngineDeath)
    assert (death.loss, death.lines, death.num_done) == ("engine", list(range(6)), 0)
    assert "the device is gone" in death.reason
    assert sorted(map(int, faulty.submitted[1])) == death.lines


def test_an_engine_that_cannot_be_started_again_ends_the_job_resumably(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    faulty = FaultyStart(start, FaultyRunner(dies_at={9}))
    num_starts = 0

    def once(*arguments: Any) -> Engine:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 1:
            raise ModelError("the weights have gone")
        return faulty(*arguments)

    with pytest.raises(ResumableJobError, match="could not be started again in 3 attempts: the weights have gone"):
        run(source, once)
    assert num_starts == 1 + 3
    report = run(source, start)
    assert (report.exit_code, 0 < report.num_before < 40, len(read(source))) == (0, True, 40)


def test_a_stream_survives_deaths_too_but_is_not_resumable(
    write_lines: WriteLines, start: Start, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = write_lines(*prompts(20, poison=(4,)))
    job = JobSpec(input=str(source), output="-")
    report = run_job(job, start=FaultyStart(start, FaultyRunner(dies_at={12})), rules=AT_ONCE, quiet=True)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (19, {"poison_request": 1})
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(20))
    always = FaultyStart(start, FaultyRunner(always=True))
    with pytest.raises(JobError, match="this job cannot be resumed: its input or output is a stream") as raised:
        run_job(job, start=always, rules=AT_ONCE, quiet=True)
    assert not isinstance(raised.value, ResumableJobError)


@pytest.mark.parametrize("min_lines_for_process", [1_000, 1])
def test_nothing_of_a_dead_engine_is_held_when_the_next_one_is_loaded(
    write_lines: WriteLines, start: Start, min_lines_for_process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights and its cache would take the memory of the next one."""
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 2)
    runners: list[weakref.ref[FaultyRunner]] = []
    still_there: list[bool] = []

    def started(config: EngineConfig, deliver: Any) -> Engine:
        still_there.append(any(runner() is not None for runner in runners))
        runner = FaultyRunner(dies_at={6} if len(runners) < 3 else ())
        runners.append(weakref.ref(runner))
        return start(config, deliver, runner=runner)

    source = write_lines(*prompts(60))
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"))
    report = run_job(job, start=started, rules=AT_ONCE, min_lines_for_process=min_lines_for_process, quiet=True)
    assert (report.exit_code, report.failures.deaths) == (0, {"engine": 3})
    assert still_there == [False] * 4


def test_an_engine_whose_death_is_seen_by_submit_is_replaced_too(write_lines: WriteLines, start: Start) -> None:
    """A call may fail before the empty event list that reports the death arrives."""
    source = write_lines(*prompts(40))
    faulty = FaultyStart(start, FaultyRunner(dies_at={3}))
    num_calls = 0

    def dies_in_submit(config: EngineConfig, deliver: Any) -> Engine:
        engine = faulty(config, deliver)
        submit = engine.client.submit

        def waits_for_death(request: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 20:  # the engine dies at its third step
                while engine.client.failure is None:
                    time.sleep(0.001)
            submit(request)

        engine.client.submit = waits_for_death  # type: ignore[method-assign]
        return engine

    report = run(source, dies_in_submit)
    assert (report.exit_code, len(read(source)), report.failures.deaths) == (0, 40, {"engine": 1})
