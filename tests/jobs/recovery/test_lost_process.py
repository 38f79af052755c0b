"""Jobs whose whole process was lost, and the log of failures that the next run reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import ModelError, ResumableJobError
from headrace.jobs.recovery.policy import Progress, RecoveryPolicy
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, Retry, Suspicion, read_entries
from headrace.jobs.store.in_flight_file import InFlightFile, lines_in_flight
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.manifest import read_manifest, write_manifest
from headrace.startup import Report
from tests.jobs.faults import FaultyRunner, FaultyStart
from tests.jobs.recovery.failing_jobs import Start, WriteLines, directory_of, prompts, read, run


def lose_process(source: Path, indices: list[int], *, num_epochs: int = 0) -> None:
    """As if the process of the last run, or of one that came `num_epochs` later, had been killed with these lines in
    flight."""
    directory = directory_of(source)
    manifest = read_manifest(directory)
    assert manifest is not None
    epoch = manifest.epoch + num_epochs
    write_manifest(directory, replace(manifest, state="running", epoch=epoch))
    file = InFlightFile(directory / "in-flight", epoch=epoch)
    file.add(indices)
    file.close()


def interrupted(source: Path, start: Start, *, at: int = 9) -> None:
    def lost() -> BaseException:
        return RuntimeError("CUDA error: gone")

    with pytest.raises(ResumableJobError):
        run(source, FaultyStart(start, FaultyRunner(dies_at={at}, error=lost, is_poison=False)))


def test_a_loss_is_counted_once_however_often_the_next_run_fails(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(20))
    interrupted(source, start)
    lose_process(source, sorted(set(range(20)) - done_indices(source)))

    def never(*arguments: Any) -> Engine:
        raise ModelError("no model")

    for _ in range(3):
        with pytest.raises(ModelError):
            run(source, never)
        lose_process_again(source)
    log = FailureLog(directory_of(source) / "trouble.jsonl")
    assert log.counts.deaths == {"device": 1, "process": 1}


def done_indices(source: Path) -> set[int]:
    return {record.index for record in view_job(directory_of(source)).records()}


def lose_process_again(source: Path) -> None:
    directory = directory_of(source)
    manifest = read_manifest(directory)
    assert manifest is not None
    write_manifest(directory, replace(manifest, state="running"))


def test_lines_in_flight_are_known_for_the_same_epoch_and_boot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.store import in_flight_file

    path = tmp_path / "in-flight"
    file = InFlightFile(path, epoch=3)
    assert lines_in_flight(path, epoch=3) == []
    file.add([5, 2**40, 7])
    assert lines_in_flight(path, epoch=3) == [5, 2**40, 7]
    file.remove(5)
    file.remove(6)
    file.add([0, 7, 9])
    assert lines_in_flight(path, epoch=3) == [0, 2**40, 7, 9]
    assert lines_in_flight(path, epoch=4) is None
    file.clear()
    assert lines_in_flight(path, epoch=3) == []
    file.add([1, 2])
    file.close()
    with monkeypatch.context() as patch:
        patch.setattr(in_flight_file, "boot_id", lambda: b"another machine.")
        assert lines_in_flight(path, epoch=3) is None
    data = path.read_bytes()
    for place in (0, 5, 12, 30, 42):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert lines_in_flight(path, epoch=3) is None
    path.write_bytes(data[:20])
    assert lines_in_flight(path, epoch=3) is None
    assert lines_in_flight(tmp_path / "none", epoch=3) is None


def test_after_a_lost_process_the_engine_has_one_of_its_own(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.run import run_job as run_module

    started = []
    monkeypatch.setattr(run_module, "start_engine", lambda *a, report: started.append("thread") or start(*a))
    monkeypatch.setattr(run_module, "start_engine_process", lambda *a, report: started.append("process") or start(*a))
    source = write_lines(*prompts(20))
    interrupted(source, start)
    run(source, None)
    run(write_lines(*prompts(3)), None, overwrite=True)
    assert started == ["process", "thread"]


def test_no_line_is_blamed_for_losses_of_a_process_that_is_not_the_engines(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is preempted again and again, each time with the same long line in flight."""
    from headrace.jobs.run import run_job as run_module

    def no_model(*arguments: Any, report: Report) -> Engine:
        raise ModelError("no model")

    source = write_lines(*prompts(20))
    interrupted(source, start)  # the next runs have their engine in a separate process
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "start_engine_process", no_model)
        for _ in range(9):
            lose_process(source, [19], num_epochs=1)
            with pytest.raises((ModelError, ResumableJobError)):
                run(source, None)

    def with_model(*arguments: Any, report: Report) -> Engine:
        return start(*arguments)

    monkeypatch.setattr(run_module, "start_engine_process", with_model)
    report = run(source, None)
    assert (report.exit_code, report.failures.poison_rows, len(read(source))) == (0, 0, 20)
    assert report.failures.deaths == {"device": 1, "process": 9}


def test_a_job_whose_process_is_lost_again_and_again_without_progress_says_so() -> None:
    policy = RecoveryPolicy(FailureLog(None), EngineConfig())
    for epoch in range(1, 4):
        policy.process_was_lost(epoch, [7], Progress(0, 0), had_own_process=True)
    with pytest.raises(ResumableJobError, match="the job's process was lost 4 times in a row without a line done"):
        policy.process_was_lost(4, [7], Progress(0, 0), had_own_process=True)
    assert policy.suspects_of(0).trial is None


def test_a_torn_record_of_the_failure_log_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "trouble.jsonl"
    log = FailureLog(path)
    log.append(Retry(1, "engine_error"))
    log.append(EngineDeath("engine", "why", [1, 2], 0, Suspicion([1, 2])))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        again = FailureLog(path)
        again.append(Retry(9, "engine_error"))
        whole = data[:size].count(b"\n")
        assert FailureLog(path).num_retries[9] == 1
        assert len(read_entries(path)) in (whole + 1, whole + 2), "a record without its line break may be whole"
