"""`headrace status`, `cancel` and `clean` over a job that the test writes, and the related options of `run`."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import ResumableJobError
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.lock import JobLock
from headrace.jobs.store.status_file import JobStatus, write_status


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of a job that was killed with two of its three lines done, one of them an error."""
    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' * 3)
    job = JobSpec(input=str(source), output=str(tmp_path / "out.jsonl"))
    with closing(job.open_input()) as opened:
        directory = JobDirectory.open(job, opened)
    directory.begin(num_expected=3)
    directory.append(2, b'{"index":2,"text":"two"}')
    directory.append(1, b'{"index":1,"error":{"code":"empty_prompt"}}', error="empty_prompt")
    directory.journal.commit()
    directory.close()
    return tmp_path / "out.jsonl"


def status(pid: int) -> JobStatus:
    return JobStatus(
        state="running",
        output="out.jsonl",
        model="m",
        pid=pid,
        started_at=0.0,
        updated_at=1.0,
        seconds=1.0,
        lines_total=3,
        lines_done=2,
        lines_answered=1,
        lines_failed=1,
        lines_in_flight=1,
        lines_ready=0,
        seconds_left=7.0,
    )


def test_status_shows_the_progress_of_a_job(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "interrupted" in shown and "2 of 3" in shown and "empty_prompt 1" in shown
    assert main(["status", f"{output}.job", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["lines"], facts["errors"], facts["expected"]) == ("interrupted", 2, 1, 3)


def test_status_prints_the_results_so_far(output: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["status", str(output), "--results"]) == 0
    assert [json.loads(line)["index"] for line in capfdbinary.readouterr().out.splitlines()] == [2, 1]
    assert main(["status", str(output), "--results", "--keep-order"]) == 0
    assert [json.loads(line)["index"] for line in capfdbinary.readouterr().out.splitlines()] == [1, 2]


def test_a_running_job_shows_its_process_and_can_be_cancelled(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = JobLock.take(Path(f"{output}.job") / "lock")
    assert main(["status", str(output)]) == 0
    assert "running: process " in capsys.readouterr().out
    for pid, is_shown in ((os.getpid(), True), (os.getpid() + 1, False)):  # of this process, and of an earlier one
        write_status(Path(f"{output}.job") / "status.json", status(pid))
        assert main(["status", str(output)]) == 0
        assert ("2/3 lines, 7 s left · in" in capsys.readouterr().out) == is_shown
        assert main(["status", str(output), "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["status"] is not None) == is_shown
    assert main(["cancel", str(output)]) == 0
    assert "asked process " in capsys.readouterr().out
    assert (Path(f"{output}.job") / "cancel").exists()
    assert main(["clean", str(output), "--force"]) == 1
    assert "is running already" in capsys.readouterr().err
    lock.release()


def test_a_stopped_job_can_be_cancelled_undone_and_removed(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", str(output)]) == 0
    main(["status", str(output)])
    assert "cancelled: by 'headrace cancel'" in capsys.readouterr().out
    assert main(["cancel", str(output), "--undo"]) == 0
    assert main(["clean", str(output)]) == 1
    assert "give --force" in capsys.readouterr().err
    assert main(["clean", str(output), "--force"]) == 0
    assert main(["status", str(output)]) == 1
    assert "there is no job" in capsys.readouterr().err


def test_the_options_of_run_become_a_job(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[JobSpec] = []

    def run_job(job: JobSpec, **options: object) -> None:
        jobs.append(job)
        raise ResumableJobError("no room")

    monkeypatch.setattr("headrace.jobs.run.run_job.run_job", run_job)
    monkeypatch.setattr("headrace.cli.fetching.fetch_if_missing", lambda model, **options: None)
    common = ["run", str(output.parent / "in.jsonl"), "-o", str(output)]
    again = ["--redo", "finish_reason=length", "--set", "max_tokens=20", "--set", "stop=x"]
    assert main([*common, "--keep-order", "--grace", "2.5", *again]) == 75
    assert main([*common, "--retry-errors"]) == 75
    first, second = jobs
    assert (first.keep_order, first.grace_s, first.redo) == (True, 2.5, "finish_reason=length")
    assert first.overrides == {"max_tokens": 20, "stop": "x"}
    assert second.redo == "error"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--set", "max_tokens=3"], "select them with redo"),
        (["--redo", "error", "--set", "max_tokns=3"], "unknown parameter 'max_tokns', did you mean 'max_tokens'"),
        (["--redo", "error", "--set", "max_tokens"], "must be NAME=VALUE"),
        (["--redo", "error", "--set", "max_tokens=0"], "max_tokens must be at least 1"),
        (["--redo", "sometimes"], "is not a condition"),
    ],
)
def test_an_invalid_redo_is_refused(
    output: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["run", str(output.parent / "in.jsonl"), "-o", str(output), *options]) == 2
    assert message in capsys.readouterr().err
