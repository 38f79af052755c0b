"""A job on the disk, `answers.jsonl.job` beside its output: lock, manifest and journal, and what is left to do.

open ──▶ (nothing left: no model is loaded) ──▶ begin: a new epoch ──▶ append, flush ... ──▶ publish ──▶ completed
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import JobError
from headrace.jobs import crash_points
from headrace.jobs.files import job_error, sync_directory
from headrace.jobs.formats import Source, SourceIdentity, what_changed
from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.line_index import Bitmap
from headrace.jobs.formats.locations import exists, is_url, local_path, num_bytes
from headrace.jobs.input.reply import EXPIRED
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.committed import MAX_ATTEMPT
from headrace.jobs.store.done_ids import DoneIds
from headrace.jobs.store.failure_log import FAILURE_LOG_NAME, FailureLog
from headrace.jobs.store.fingerprint import fingerprint_of, first_difference
from headrace.jobs.store.in_flight_file import IN_FLIGHT_NAME, lines_in_flight
from headrace.jobs.store.journal import Journal
from headrace.jobs.store.lock import JobLock
from headrace.jobs.store.manifest import (
    DeadlineSet,
    Manifest,
    Pass,
    State,
    manifest_path,
    read_manifest,
    write_manifest,
)
from headrace.jobs.store.publish import publish
from headrace.jobs.store.record import Record
from headrace.jobs.store.redo import Where
from headrace.jobs.store.segments import remove_segments
from headrace.jobs.store.status_file import STATUS_NAME
from headrace.jobs.times import deadline_at

TEMPLATE = "template"
CANCEL = "cancel"  # a file: somebody wants the job to stop


class JobDirectory:
    """Owned by the process that runs the job. Nothing is changed before `begin`, but for a torn tail, which is cut."""

    def __init__(self, job: JobSpec, source: Source, lock: JobLock, earlier: Manifest | None) -> None:
        self.path = job.directory
        self._job = job
        self._source = source
        self._lock = lock
        self._earlier = None if job.overwrite else earlier
        self._given_up = earlier if job.overwrite else None
        self._identity = self._check_identity()
        self._fingerprint = fingerprint_of(job)
        self._check_fingerprint()
        self.current = self._choose_pass()
        last = self._earlier or self._given_up
        self._epoch = last.epoch + 1 if last else 1
        self._first_epoch = self._earlier.first_epoch if self._earlier else self._epoch
        replayed = _Replayed(self.path)
        self.journal = Journal.open(
            self.path,
            epoch=self._epoch,
            first_epoch=self._first_epoch,
            sealed=self._earlier.sealed if self._earlier else {},
            watch=replayed.add,
        )
        self.seen_ids = replayed.ids.seen()
        self.redone = self._choose_rows()
        self._errors_before = None if self.redone or self.journal.has_repeats else replayed.errors
        self.num_before = self.journal.num_done - len(self.redone)
        self.lost_lines = self._find_lost_rows()
        self.deadline = self._choose_deadline()
        self.job_id = self._earlier.job_id if self._earlier else uuid.uuid4().hex[:16]
        self._manifest: Manifest | None = None  # once it has begun
        self._manifest_name = str(manifest_path(self.path))
        self._signature: tuple[int, int] | None = None

    @classmethod
    def open(cls, job: JobSpec, source: Source) -> JobDirectory:
        path = job.directory
        try:
            path.mkdir(exist_ok=True)
            lock = JobLock.take(path / "lock")
        except OSError as error:
            raise job_error(f"the job's directory {path} cannot be written: {error.strerror}", error) from error
        crash_points.reach("lock-taken")
        try:
            return cls(job, source, lock, _read_earlier(path, job))
        except BaseException:
            _leave(path, lock)
            raise

    # What is left to do.

    @property
    def is_fresh(self) -> bool:
        return self.journal.num_done == 0

    @property
    def is_published(self) -> bool:
        """Completed, its output in place, in the order and the format that are asked for."""
        earlier = self._earlier
        return (
            earlier is not None
            and earlier.is_done
            and earlier.published_in_order == self._job.keep_order
            and earlier.published_format == self._output_format
            and exists(self._job.output)
        )

    @property
    def state_when_done(self) -> State:
        """Of a job that has nothing left to do."""
        has_expired = self.journal.num_errors and any(record.error == EXPIRED for record in self.journal.records())
        return "expired" if has_expired else "completed"

    def is_done(self, index: int) -> bool:
        """Whether the row is to be skipped."""
        return self.journal.is_done(index) and index not in self.redone

    def has_result(self, index: int) -> bool:
        """Whether the row is done, and has been done again if it is to be."""
        return self.journal.is_done(index) and (
            index not in self.redone or self.journal.last_attempt(index) >= self.current.number
        )

    def _find_lost_rows(self) -> list[int]:
        """That were in flight when the process before this one ended without a word."""
        earlier = self._earlier
        if earlier is None or earlier.state != "running":
            return []
        rows = lines_in_flight(self.path / IN_FLIGHT_NAME, epoch=earlier.epoch)
        return [row for row in rows or () if not self.has_result(row)]

    @property
    def epoch(self) -> int:
        return self._epoch

    def failure_log(self) -> FailureLog:
        return FailureLog(
            self.path / FAILURE_LOG_NAME, epoch=self._epoch, first_epoch=self._first_epoch, turn=self.current.number
        )

    @property
    def is_cancelled(self) -> bool:
        return (self.path / CANCEL).exists()

    # Running.

    def begin(self, *, template: str | None = None, num_expected: int | None = None) -> None:
        """From here on the job is this process's, and the one that had it before can write no more."""
        self._check_template(template)
        if self._earlier is None and self._given_up is None:
            remove_segments(self.path)  # without a manifest they are what an unfinished removal has left
            sync_directory(self.path.parent)
        self._write(
            Manifest(
                job_id=self.job_id,
                state="running",
                epoch=self._epoch,
                first_epoch=self._first_epoch,
                created=self._earlier.created if self._earlier else time.strftime("%Y-%m-%d %H:%M:%S"),
                input=_full_name(self._job.input) if self._identity is not None else self._job.input,
                output=_full_name(self._job.output),
                identity=self._identity,
                fingerprint=self._fingerprint,
                sealed=self.journal.sealed,
                current=self.current,
                num_expected=num_expected,
                deadline=self.deadline,
            )
        )
        remove_segments(self.path, before_epoch=self._first_epoch)
        for name in (STATUS_NAME, f"{STATUS_NAME}.tmp"):  # what they say is of a process that has gone
            (self.path / name).unlink(missing_ok=True)
        if self._job.overwrite:
            (self.path / CANCEL).unlink(missing_ok=True)
        self.journal.guard(self.is_ours)

    def append(self, index: int, result: bytes, *, error: str | None = None) -> bool:
        return self.journal.append(index, result, self.current.number, error)

    def flush(self) -> None:
        self.journal.flush()

    @property
    def num_buffered_bytes(self) -> int:
        return self.journal.num_buffered_bytes

    @property
    def seconds_to_flush(self) -> float | None:
        return self.journal.seconds_to_flush

    def marks(self, errors: Counter[str]) -> dict[str, Any]:
        """What a status says of the journal, so that it can be told later whether it is still right."""
        journal, before = self.journal, self._errors_before
        return {
            "epoch": self._epoch,
            "journal_bytes": journal.num_bytes,
            "error_lines": None if before is None else dict(before + errors - journal.buffered_errors()),
            "lines_held": journal.num_buffered,
        }

    @property
    def _output_format(self) -> str:
        return str(format_of(self._job.output, self._job.output_format))

    def publish(self, state: State = "completed") -> None:
        """Everything is done: commit, merge, rename; and then the job is completed, or expired."""
        self.journal.commit()
        crash_points.reach("input-ended")
        in_order = self._job.keep_order
        publish(
            self.journal.output_lines(in_order=in_order),
            self._job.output,
            format=self._output_format,
            directory=self.path,
            num_results=self.journal.num_done,
        )
        assert self._manifest is not None
        self._write(
            replace(self._manifest, state=state, published_in_order=in_order, published_format=self._output_format)
        )
        (self.path / CANCEL).unlink(missing_ok=True)  # it came too late
        crash_points.reach("completed")

    def stop(self, state: State, reason: str) -> None:
        """Commit what there is and say why it goes no further."""
        self.journal.commit()
        if self._manifest is not None:
            self._write(self._manifest.with_state(state, reason))
        if state == "cancelled":
            (self.path / CANCEL).unlink(missing_ok=True)

    def close(self) -> None:
        self.journal.close()
        _leave(self.path, self._lock)

    # What it must agree with.

    def _check_identity(self) -> SourceIdentity | None:
        if self._earlier is None:
            return self._source.identity()
        earlier = self._earlier.identity
        if earlier is None:
            raise JobError(
                f"the job in {self.path} read its input from a pipe, which cannot be read again: what it committed is "
                f"had with 'headrace status {self.path} --results'; give another output with -o, or --overwrite"
            )
        if self._source.identity(0) is None:
            raise JobError(
                f"the job in {self.path} was begun with the input {self._earlier.input}, now it is "
                f"{self._job.input}, which is no file; name the file, give another output with -o, or --overwrite"
            )
        change = what_changed(self._source, earlier)
        if change is not None:
            raise JobError(
                f"the input is not what it was when the job in {self.path} began: {change}; restore it, give another "
                "output with -o, or --overwrite"
            )
        return self._source.identity() if num_bytes(self._job.input) > earlier.size else earlier

    def _check_template(self, template: str | None) -> None:
        """Known only when the model is there; a run without a model keeps what was known."""
        known = self._earlier.fingerprint.get(TEMPLATE) if self._earlier else None
        self._fingerprint[TEMPLATE] = template or known
        if known is not None:
            self._check_fingerprint()

    def _check_fingerprint(self) -> None:
        if self._earlier is None:
            return
        known = {
            name: value
            for name, value in self._earlier.fingerprint.items()
            if name in self._fingerprint or name != TEMPLATE
        }
        difference = first_difference(known, self._fingerprint)
        if difference is not None:
            name, old, new = difference
            raise JobError(
                f"the job in {self.path} was begun with {name}={_shown(old)}, now {name}={_shown(new)}: its results "
                "would not belong together; give the earlier value, another output with -o, or --overwrite"
            )

    def _choose_pass(self) -> Pass:
        """The one that was interrupted, or with --redo another one over the same rows."""
        current = self._earlier.current if self._earlier else Pass()
        where, overrides = self._job.redo, dict(self._job.overrides)
        if where is None:
            return current
        if self._earlier is None:
            raise JobError(f"--redo {where!r}: there is no job in {self.path} whose rows could be done again")
        is_same = (current.where, current.overrides) == (where, overrides)
        if is_same and not self._earlier.is_done:
            return current
        if current.number == MAX_ATTEMPT:
            raise JobError(f"the job in {self.path} was redone {MAX_ATTEMPT} times, which is the most; --overwrite it")
        return Pass(number=current.number + 1, where=where, overrides=overrides)

    def _choose_deadline(self) -> DeadlineSet | None:
        """The moment that was meant when it was first given in this pass."""
        text, known = self._job.deadline, self._earlier.deadline if self._earlier else None
        if text is None:
            return None
        if known is not None and (known.text, known.turn) == (text, self.current.number):
            return known
        return DeadlineSet(text=text, turn=self.current.number, at=deadline_at(text, now=time.time()))

    def _choose_rows(self) -> Bitmap:
        rows = Bitmap()
        if self._job.redo is None:
            return rows
        where = Where(self._job.redo)
        for record in self.journal.records():
            if where.matches(record) and self.journal.last_attempt(record.index) < self.current.number:
                rows.add(record.index)
        where.refuse_unseen()
        return rows

    # The manifest.

    def _write(self, manifest: Manifest) -> None:
        try:
            write_manifest(self.path, manifest)
        except OSError as error:
            raise job_error(f"the job's directory {self.path} cannot be written: {error.strerror}", error) from error
        self._manifest = manifest
        self._signature = self._sign()

    def _sign(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._manifest_name)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def is_ours(self) -> bool:
        """Whether no other process has taken the job over."""
        if self._sign() == self._signature:
            return True
        found = read_manifest(self.path)
        return found is not None and found.epoch == self._epoch


class _Replayed:
    """What is learnt of the records of a journal as it is opened."""

    def __init__(self, directory: Path) -> None:
        self.ids = DoneIds(directory)
        self.errors: Counter[str] = Counter()  # by code; of rows with several results, all

    def add(self, record: Record) -> None:
        self.ids.add(record)
        if record.error is not None:
            self.errors[record.error] += 1


def _read_earlier(path: Path, job: JobSpec) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except JobError:
        if job.overwrite:
            return None
        raise
    if manifest is not None and not job.overwrite:
        _refuse_cancelled(path, manifest)
    return manifest


def _refuse_cancelled(path: Path, manifest: Manifest) -> None:
    if manifest.state == "cancelled" or (path / CANCEL).exists():
        raise JobError(
            f"the job in {path} was cancelled; 'headrace cancel --undo {path}' lets it go on, --overwrite starts anew"
        )


def _leave(path: Path, lock: JobLock) -> None:
    """A directory in which nothing ever began is removed."""
    if not manifest_path(path).exists():
        (path / "lock").unlink(missing_ok=True)
    lock.release()
    try:
        path.rmdir()
    except OSError:
        pass  # it holds a job


def _full_name(path: str) -> str:
    return path if is_url(path) else os.path.realpath(local_path(path))


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
