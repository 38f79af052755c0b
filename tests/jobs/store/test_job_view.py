"""A job is shown without reading its journal while its last status is still right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import pytest

from headrace.engine.start import Engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.store import job_view as module
from headrace.jobs.store.job_view import FRESH_SECONDS, view_job
from headrace.jobs.store.lock import JobLock
from headrace.jobs.store.status_file import STATUS_NAME, JobStatus, read_status, write_status

LINES: list[Any] = [{"prompt": f"line {number}", "max_tokens": 2} for number in range(20)] + [
    "no json",
    {"no": "prompt"},
]


@pytest.fixture
def job(start: Callable[..., Engine], write_lines: Callable[..., Path], tmp_path: Path) -> JobSpec:
    """A completed job."""
    spec = JobSpec(input=str(write_lines(*LINES)), output=str(tmp_path / "out.jsonl"))
    run_job(spec, start=start, quiet=True)
    return spec


def facts(job: JobSpec) -> dict[str, Any]:
    return view_job(job.directory).as_json()


def changed(job: JobSpec, **fields: Any) -> JobStatus:
    status = dataclasses.replace(read_status(job.directory / STATUS_NAME), **fields)
    write_status(job.directory / STATUS_NAME, status)
    return status


def counts(job: JobSpec) -> tuple[Any, ...]:
    found = facts(job)
    return found["lines"], found["errors"], found["errors_by_code"], found["bytes"]


def test_an_ended_job_is_shown_without_reading_its_journal(job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = counts(job)
    assert facts(job)["counted"] == "status"
    assert shown[:3] == (22, 2, {"invalid_json": 1, "missing_prompt": 1})
    with monkeypatch.context() as patched:
        patched.setattr(module, "replay", lambda segments: pytest.fail("the journal was read"))
        assert counts(job) == shown
    (job.directory / STATUS_NAME).unlink()
    assert facts(job)["counted"] == "journal"
    assert counts(job) == shown


def test_counts_of_earlier_runs_are_included(
    start: Callable[..., Engine], write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    source, output = write_lines(*LINES, *LINES), str(tmp_path / "out.jsonl")
    run_job(JobSpec(input=str(source), output=output, limit=22), start=start, quiet=True)
    whole = JobSpec(input=str(source), output=output)
    run_job(whole, start=start, quiet=True)
    assert facts(whole)["counted"] == "status"
    assert counts(whole)[:3] == (44, 4, {"invalid_json": 2, "missing_prompt": 2})


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "running"},  # but its process has ended: it may have done more
        {"state": "failed"},
        {"epoch": 7},
        {"journal_bytes": 1},
        {"error_lines": None},
    ],
)
def test_a_status_that_may_be_wrong_is_not_trusted(job: JobSpec, fields: dict[str, Any]) -> None:
    changed(job, lines_done=5, **fields)
    found = facts(job)
    assert (found["counted"], found["lines"]) == ("journal", 22)


def test_a_journal_that_has_grown_is_read(job: JobSpec) -> None:
    (segment,) = job.directory.glob("seg-*")
    first = segment.read_bytes().partition(b"\n")[0] + b"\n"
    segment.write_bytes(segment.read_bytes() + first)
    found = facts(job)
    assert (found["counted"], found["lines"]) == ("journal", 22)


@pytest.mark.parametrize("content", [b"", b"{}", b"no json"])
def test_a_status_that_cannot_be_read_is_ignored(job: JobSpec, content: bytes) -> None:
    (job.directory / STATUS_NAME).write_bytes(content)
    assert (facts(job)["counted"], facts(job)["lines"]) == ("journal", 22)


def test_the_status_of_a_running_job_is_trusted_while_it_is_fresh(job: JobSpec) -> None:
    lock = JobLock.take(job.directory / "lock")
    try:
        changed(job, state="running", lines_done=5, updated_at=time())
        assert (facts(job)["counted"], facts(job)["lines"], facts(job)["state"]) == ("status", 5, "running")
        changed(job, updated_at=time() - FRESH_SECONDS - 1)
        assert (facts(job)["counted"], facts(job)["lines"]) == ("journal", 22)
    finally:
        lock.release()


def test_after_lines_were_repeated_the_journal_is_read(job: JobSpec, start: Callable[..., Engine]) -> None:
    run_job(dataclasses.replace(job, redo="error"), start=start, quiet=True)
    assert facts(job)["counted"] == "journal"
    assert counts(job)[:3] == (22, 2, {"invalid_json": 1, "missing_prompt": 1})
