"""Full disks: the journal keeps what it could not write, and the job waits."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.start import Engine
from headrace.errors import NoRoomError
from headrace.jobs import files
from headrace.jobs.recovery import disk_full
from headrace.jobs.recovery.disk_full import DiskWait, retry_on_full_disk
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.store import journal as journal_module
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.journal import Journal
from headrace.jobs.store.status_file import JobStatus, read_status, write_status

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


def full(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def over_quota(*arguments: Any) -> Any:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def half_written(descriptor: int, data: bytes) -> int:
    """Writes some bytes, then fails."""
    if len(data) > 30:
        return real_write(descriptor, bytes(data)[:10])
    return int(full())


real_write = os.write


def result_of(index: int) -> bytes:
    return json.dumps({"index": index, "text": "x" * (index % 7)}).encode()


# Which call fails, in which module.
PLACES: dict[str, tuple[Any, str, Any]] = {
    "write": (os, "write", full),
    "quota": (os, "write", over_quota),
    "half a write": (os, "write", half_written),
    "sync": (os, "fdatasync", full),
    "new segment": (os, "open", full),
    "name of the segment": (journal_module, "sync_directory", full),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("has_segment", [False, True])
def test_a_journal_continues_when_the_disk_has_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, has_segment: bool
) -> None:
    if has_segment and place in ("new segment", "name of the segment"):
        monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal = Journal.open(tmp_path, epoch=1)
    if has_segment:
        journal.append(0, result_of(0))
        journal.commit()
    for index in range(1, 4):
        journal.append(index, result_of(index))
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place])
        for attempt in range(3):
            with pytest.raises(NoRoomError, match="make room, then run the same command"):
                journal.commit()
            journal.append(10 + attempt, result_of(10 + attempt))
            assert journal.num_buffered_bytes >= sum(len(result_of(index)) for index in range(1, 4))
    journal.append(20, result_of(20))
    journal.commit()
    expected = {index: result_of(index) for index in ([0] if has_segment else []) + [1, 2, 3, 10, 11, 12, 20]}
    assert dict(journal.results()) == expected
    for in_order in (False, True):
        assert sorted(journal.output_lines(in_order=in_order)) == sorted(expected.values())
    assert journal.num_unsynced == 0
    journal.close()
    again = Journal.open(tmp_path, epoch=2)
    assert dict(again.results()) == expected
    assert sorted(again.output_lines(in_order=False)) == sorted(expected.values())


def test_what_a_failed_sync_has_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may drop pages that could not be written."""
    journal = Journal.open(tmp_path, epoch=1)
    journal.append(0, result_of(0))
    journal.commit()
    (segment,) = tmp_path.glob("seg-*")
    size = segment.stat().st_size
    journal.append(1, result_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(NoRoomError):
            journal.commit()
    data = segment.read_bytes()
    segment.write_bytes(data[:size] + bytes(len(data) - size))
    journal.append(2, result_of(2))
    journal.commit()
    assert sorted(journal.output_lines(in_order=False)) == [result_of(index) for index in range(3)]
    journal.close()
    assert dict(Journal.open(tmp_path, epoch=2).results()) == {index: result_of(index) for index in range(3)}


# The job.


def prompts(num_lines: int) -> list[dict[str, Any]]:
    return [{"prompt": f"line {number}", "max_tokens": 4, "ignore_eos": True} for number in range(num_lines)]


class Disk:
    """Full at some of the writes to segments, by their number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_full: Callable[[int], bool]) -> None:
        self.num_writes = 0
        self.at_full: Callable[[], None] = lambda: None
        self._is_full = is_full
        monkeypatch.setattr(Journal, "_write", self._wrap(Journal._write))
        monkeypatch.setattr(disk_full, "TRY_SECONDS", 0.0)

    def _wrap(self, real: Any) -> Any:
        def write(journal: Journal, data: bytes) -> None:
            self.num_writes += 1
            if self._is_full(self.num_writes):
                self.at_full()
                full()
            real(journal, data)

        return write


def test_a_job_pauses_while_the_disk_is_full_and_continues(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.status import meter

    monkeypatch.setattr(meter, "TICK_SECONDS", 0.0)
    monkeypatch.setattr("headrace.jobs.run.main_loop.TICK_SECONDS", 0.001)
    source, told = write_lines(*prompts(60)), io.StringIO()
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"))
    states: list[tuple[str, str | None, str]] = []
    disk = Disk(monkeypatch, lambda number: 3 <= number < 12)

    def look() -> None:
        path = job.directory / "status.json"
        if path.exists():
            status = read_status(path)
            found = view_job(job.directory)
            states.append((status.state, status.paused_because, found.state))
            if status.state == "paused":
                shown = found.as_json()
                held.append(status.lines_held)
                assert (shown["counted"], shown["lines"]) == ("status", found.committed.num_done)

    held: list[int] = []
    disk.at_full = look
    report = run_job(job, start=start, stream=told)
    assert (report.exit_code, report.tally.num_answered) == (0, 60)
    indices = [json.loads(line)["index"] for line in (source.parent / "out.jsonl").read_text().splitlines()]
    assert sorted(indices) == list(range(60))
    assert "headrace: paused, the disk is full: " in told.getvalue()
    assert "headrace: the disk has space again; continuing" in told.getvalue()
    state, reason, shown = states[-1]
    assert (state, shown) == ("paused", "paused")
    assert held[-1] > 0, "they are done, but not in the journal"
    assert reason is not None and "bytes wait to be written" in reason
    assert read_status(job.directory / "status.json").state == "finished"


def test_nothing_is_started_while_the_disk_is_full(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*prompts(100))
    submitted: list[str] = []
    counts: list[int] = []

    def counting(*arguments: Any) -> Engine:
        engine = start(*arguments)
        submit = engine.client.submit
        engine.client.submit = lambda request: (submitted.append(request.request_id), submit(request))[1]
        return engine

    disk = Disk(monkeypatch, lambda number: 3 <= number < 30)
    disk.at_full = lambda: counts.append(len(submitted))
    run_job(JobSpec(input=str(source), output=str(source.parent / "o.jsonl")), start=counting, quiet=True)
    assert len(counts) == 27
    assert len(set(counts)) == 1


def test_a_wait_that_is_over_ends_the_job_resumably(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*prompts(60))
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), disk_wait_s=0.0)
    with monkeypatch.context() as patch:
        Disk(patch, lambda number: number >= 3)
        with pytest.raises(NoRoomError, match="No space left on device; what was committed is kept; make room"):
            run_job(job, start=start, quiet=True)
    assert 0 < view_job(job.directory).committed.num_done < 60
    assert run_job(job, start=start, quiet=True).exit_code == 0


def test_more_results_than_may_be_held_end_the_job_resumably(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*prompts(60))
    monkeypatch.setattr("headrace.jobs.recovery.disk_full.MAX_HELD_BYTES", 100)
    Disk(monkeypatch, lambda number: number >= 3)
    with pytest.raises(NoRoomError, match="more than the 100 that are kept in memory"):
        run_job(JobSpec(input=str(source), output=str(source.parent / "o.jsonl")), start=start, quiet=True)


def test_waiting_and_giving_up_follow_the_clock() -> None:
    now = [0.0]

    class Results:
        seconds_to_flush = None
        num_buffered_bytes = 5
        num_flushes = 0

        def append(self, index: int, result: bytes, *, error: str | None = None) -> bool:
            raise AssertionError

        def flush(self) -> None:
            self.num_flushes += 1
            raise NoRoomError("no room")

    results, told = Results(), list[str]()
    wait = DiskWait(10.0, directory=None, tell=told.append, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 1.9):
        wait.flush(results)
    assert (wait.is_full, results.num_flushes, len(told)) == (True, 1, 1)
    now[0] = 2.0
    wait.flush(results)
    assert (results.num_flushes, wait.seconds_to_try, len(told)) == (2, 2.0, 1)
    now[0] = 10.0
    with pytest.raises(NoRoomError, match="no room"):
        wait.flush(results)


def test_a_single_write_is_tried_until_the_disk_has_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_full, "TRY_SECONDS", 0.0)
    left, told = iter(range(3)), list[str]()

    def action() -> None:
        if next(left, None) is not None:
            raise NoRoomError("no room")

    retry_on_full_disk(action, wait_s=1e6, tell=told.append)
    assert told == ["paused: no room; waiting for at most 1,000,000 s"]


def test_a_status_overwrites_the_old_one_if_the_disk_has_no_space_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(state: Any, reason: str | None) -> JobStatus:
        return JobStatus(
            state=state, output="o", model="m", pid=1, started_at=0.0, updated_at=0.0, seconds=0.0, lines_total=1,
            lines_done=0, lines_answered=0, lines_failed=0, lines_in_flight=0, lines_ready=0, paused_because=reason,
        )  # fmt: skip

    path = tmp_path / "status.json"
    write_status(path, status("running", "x" * 100))
    monkeypatch.setattr(Path, "write_bytes", full)
    write_status(path, status("paused", "short"))
    assert read_status(path) == status("paused", "short")
    write_status(path, status("paused", "long " * 100))
    assert read_status(path) == status("paused", "long " * 100)


def test_which_errors_mean_a_full_disk() -> None:
    assert [files.is_no_room(OSError(code, "")) for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO)] == [
        True,
        True,
        False,
    ]


# A real disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs to mount a file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_job_on_a_small_disk_continues_when_a_file_is_removed(
    write_lines: WriteLines, start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_full, "TRY_SECONDS", 0.0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(96 << 10))
    told: list[str] = []
    source = write_lines(*prompts(150))

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            told.append(text)
            if "paused" in text:
                ballast.unlink(missing_ok=True)
            return len(text)

    job = JobSpec(input=str(source), output=str(small_disk / "out.jsonl"))
    report = run_job(job, start=start, stream=Stream())
    assert (report.exit_code, any("paused" in text for text in told)) == (0, True)
    assert len((small_disk / "out.jsonl").read_text().splitlines()) == 150
