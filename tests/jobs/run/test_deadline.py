"""Jobs with a deadline, and how a deadline is written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.start import Engine
from headrace.errors import ConfigError, ResumableJobError
from headrace.jobs.planning.planner import Planner
from headrace.jobs.run import deadline as deadline_module
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport
from headrace.jobs.status.summary import headline
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.manifest import Manifest, read_manifest, write_manifest
from headrace.jobs.store.status_file import read_status
from headrace.jobs.times import deadline_at, read_duration
from headrace.runner.fake import FakeRunner
from headrace.steps import StepPlan, StepResult
from tests.jobs.faults import AT_ONCE, FaultyRunner, FaultyStart

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


def run(source: Path, start: Any, **options: Any) -> JobReport:
    options = {"deadline": "2h", **options}
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), **options)
    return run_job(job, start=start, rules=AT_ONCE, quiet=True)


def read(source: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (source.parent / "out.jsonl").read_text().splitlines()]


def never(*arguments: Any) -> Engine:
    raise AssertionError("the model was loaded")


class Late(FakeRunner):
    """At a step the clock jumps ahead by three hours. The step then waits until the job has noticed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        super().__init__(max_num_seqs=8, vocab_size=128)
        self._patch, self._step = monkeypatch, step
        self._has_noticed = threading.Event()
        drop = Planner.drop_waiting
        monkeypatch.setattr(Planner, "drop_waiting", lambda planner: (drop(planner), self._has_noticed.set())[0])

    def submit(self, plan: StepPlan) -> StepResult:
        if self.num_steps == self._step:
            self._patch.setattr(deadline_module, "monotonic", lambda: time.monotonic() + 3 * 3600)
            assert self._has_noticed.wait(60)
        return super().submit(plan)


def openai(number: int, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"line {number}", "max_tokens": 300, "ignore_eos": True, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def lines(num_short: int, num_long: int) -> list[dict[str, Any]]:
    return [openai(number, max_tokens=2 if number < num_short else 300) for number in range(num_short + num_long)]


def late_start(start: Start, monkeypatch: pytest.MonkeyPatch, step: int = 60) -> Any:
    return lambda config, deliver: start(config, deliver, runner=Late(monkeypatch, step))


def test_lines_unfinished_at_the_deadline_expire_as_in_openais_batches(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*lines(6, 30), "{broken", {"prompt": "plain " * 20, "max_tokens": 300, "id": 9})
    report = run(source, late_start(start, monkeypatch, 400))
    found = {line.get("custom_id") or line["index"]: line for line in read(source)}
    assert len(found) == 38
    answered = [name for name, line in found.items() if isinstance(name, str) and line["error"] is None]
    assert 0 < len(answered) < 36
    expired = [line for name, line in found.items() if isinstance(name, str) and name not in answered]
    assert {json.dumps([line["response"], line["error"]]) for line in expired} == {
        json.dumps(
            [
                None,
                {
                    "code": "batch_expired",
                    "message": "This request could not be executed before the completion window expired.",
                },
            ]
        )
    }
    assert all(list(line) == ["id", "custom_id", "response", "error"] for line in expired)
    assert found[36]["error"]["code"] == "invalid_json"
    assert (found[37]["error"]["code"], found[37]["id"]) == ("batch_expired", 9)
    assert (report.exit_code, report.outcome, report.was_stopped) == (3, "expired", False)
    assert report.tally.errors["batch_expired"] == len(expired) + 1
    assert headline(report).startswith(f"expired: {len(answered)} of 38 lines answered in ")
    directory = source.parent / "out.jsonl.job"
    assert view_job(directory).state == "expired"
    check_status(directory, 38, report)
    monkeypatch.undo()
    assert run(source, never).exit_code == 3, "the same command has nothing left to do"


def check_status(directory: Path, num_lines: int, report: JobReport) -> None:
    """It has the expired lines, and agrees with the journal."""
    status = read_status(directory / "status.json")
    assert (status.state, status.lines_done, status.lines_total) == ("expired", num_lines, num_lines)
    assert (status.lines_failed, status.errors) == (report.tally.num_failed, dict(report.tally.errors))
    found = view_job(directory)
    assert found.trusted_status == status
    (directory / "status.json").unlink()
    again = view_job(directory).as_json()
    assert again["counted"] == "journal"
    shown = found.as_json()
    assert (shown["counted"], shown["lines"], shown["errors_by_code"]) == ("status", num_lines, again["errors_by_code"])


def test_expired_lines_can_be_computed_again(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*lines(6, 20))
    first = run(source, late_start(start, monkeypatch))
    monkeypatch.undo()
    again = run(source, start, redo="error")
    assert again.exit_code == 0
    assert again.tally.num_answered == first.tally.errors["batch_expired"]
    assert len(read(source)) == 26
    assert view_job(source.parent / "out.jsonl.job").state == "completed"


def interrupt(source: Path, start: Start) -> Manifest:
    """Runs a job until it loses its device. Returns its manifest."""
    lost = FaultyRunner(dies_at={20}, error=lambda: RuntimeError("CUDA error: gone"))
    with pytest.raises(ResumableJobError):
        run(source, FaultyStart(start, lost))
    manifest = read_manifest(source.parent / "out.jsonl.job")
    assert manifest is not None
    return manifest


def let_deadline_pass(source: Path, manifest: Manifest) -> None:
    assert manifest.deadline is not None
    passed = replace(manifest, deadline=replace(manifest.deadline, at=time.time() - 1))
    write_manifest(source.parent / "out.jsonl.job", passed)


def test_a_deadline_counts_from_the_start_of_the_job(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*lines(6, 20))
    manifest = interrupt(source, start)
    assert manifest.deadline is not None
    assert manifest.deadline.at == pytest.approx(time.time() + 7200, abs=600)
    let_deadline_pass(source, manifest)
    report = run(source, never)
    assert (report.outcome, report.exit_code) == ("expired", 3)
    assert len(read(source)) == 26
    assert report.num_before == sum(line["error"] is None for line in read(source))
    check_status(source.parent / "out.jsonl.job", 26, report)


def test_a_different_text_sets_another_deadline(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*lines(6, 20))
    let_deadline_pass(source, interrupt(source, start))
    assert run(source, start, deadline="3h").exit_code == 0


def test_a_job_that_is_done_in_time_is_not_expired(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*lines(12, 0))
    report = run(source, start)
    assert (report.exit_code, report.outcome) == (0, "finished")


def test_expired_lines_do_not_count_as_too_many_errors(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*[openai(number) for number in range(1_200)])
    report = run(source, never, deadline="2020-01-01T00:00")
    assert report.tally.errors["batch_expired"] == 1_200


def test_a_deadline_needs_files(write_lines: WriteLines) -> None:
    source = write_lines(*lines(1, 0))
    with pytest.raises(ConfigError, match="a deadline needs an input that can be read again and an output that is a"):
        JobSpec(input=str(source), output="-", deadline="2h")
    with pytest.raises(ConfigError, match="a deadline needs"):
        JobSpec(input="-", output=str(source.parent / "o.jsonl"), deadline="2h")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("90s", 90),
        ("15m", 900),
        ("2h30m", 9_000),
        ("1d", 86_400),
        ("1.5h", 5_400),
        ("2026-12-01T06:00", datetime(2026, 12, 1, 6).timestamp() - 1_000),
        ("2026-12-01T06:00+00:00", 1_796_104_800 - 1_000),
    ],
)
def test_deadlines_are_read(text: str, expected: float) -> None:
    assert deadline_at(text, now=1_000) - 1_000 == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "2", "tomorrow", "2h 30m", "-2h", "h", "2026-13-01"])
def test_a_text_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a duration, such as 90s"):
        deadline_at(text, now=0.0)


def test_a_duration_may_have_several_units_and_anything_else_is_refused() -> None:
    assert [read_duration(text) for text in ("0", "1.5", "30m", "1h30m")] == [0, 1.5, 1_800, 5_400]
    with pytest.raises(ConfigError, match="is not a duration; write it like 90s"):
        read_duration("soon")
