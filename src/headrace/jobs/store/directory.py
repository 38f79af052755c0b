"""A job on disk, owned by the process that runs it: what is left to do, where results go, how the job ends.

open ──▶ (nothing left: no model is loaded) ──▶ begin: a new epoch ──▶ append, flush ... ──▶ publish ──▶ completed
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import JobError
from headrace.jobs import crash_points
from headrace.jobs.files import job_error, sync_directory
from headrace.jobs.formats import Source
from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.locations import exists, is_url, local_path
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.reply import EXPIRED
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.agreement import TEMPLATE, agreed_identity, check_fingerprint
from headrace.jobs.store.done_ids import DoneIds
from headrace.jobs.store.failure_log import FAILURE_LOG_NAME, FailureLog
from headrace.jobs.store.fingerprint import fingerprint_of, with_contents_of
from headrace.jobs.store.in_flight_file import IN_FLIGHT_NAME, had_processes, lines_in_flight
from headrace.jobs.store.input_watch import InputWatch
from headrace.jobs.store.journal import Journal
from headrace.jobs.store.lock import JobLock
from headrace.jobs.store.manifest import Manifest, State, manifest_path, read_manifest
from headrace.jobs.store.manifest_file import ManifestFile
from headrace.jobs.store.passes import choose_deadline, choose_lines, choose_pass
from headrace.jobs.store.publish import publish
from headrace.jobs.store.record import Record
from headrace.jobs.store.segments import remove_segments
from headrace.jobs.store.status_file import STATUS_NAME

CANCEL = "cancel"  # this file exists after a request to stop the job


class JobDirectory:
    """Owned by the process that runs the job. Changes nothing before `begin`, except that it cuts a torn tail."""

    def __init__(
        self, job: JobSpec, source: Source, lock: JobLock, earlier: Manifest | None, watch: InputWatch
    ) -> None:
        self.path = job.directory
        self._job = job
        self._lock = lock
        self._earlier = None if job.overwrite else earlier
        self._discarded = earlier if job.overwrite else None
        self._watch = watch
        self._identity = agreed_identity(job, source, self._earlier)
        self._watch.begin(self._identity)
        self._fingerprint = fingerprint_of(job)
        check_fingerprint(job, self._fingerprint, self._earlier)
        if self._earlier is not None:
            self._fingerprint = with_contents_of(self._earlier.fingerprint, self._fingerprint)
        self.current = choose_pass(job, self._earlier)  # the pass of this run
        last = self._earlier or self._discarded
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
        self.redone = choose_lines(job, self.current, self.journal)
        self._errors_before = None if self.redone or self.journal.has_repeats else replayed.errors
        self.num_before = self.journal.num_done - len(self.redone)
        self.lost_lines = self._find_lost_lines()
        self.had_engine_processes = had_processes(self.path / IN_FLIGHT_NAME)  # in the run that lost them
        self.deadline = choose_deadline(job, self.current, self._earlier)
        self.job_id = self._earlier.job_id if self._earlier else uuid.uuid4().hex[:16]
        self._manifest = ManifestFile(self.path, epoch=self._epoch)

    @classmethod
    def open(cls, job: JobSpec, source: Source) -> JobDirectory:
        path = job.directory
        try:
            path.mkdir(exist_ok=True)
            lock = JobLock.take(path / "lock")
        except OSError as error:
            raise job_error(f"the job directory {path} cannot be written: {error.strerror}", error) from error
        crash_points.reach("lock-taken")
        watch = InputWatch(source)
        try:
            return cls(job, source, lock, _read_earlier(path, job), watch)
        except BaseException:
            watch.close()
            _leave(path, lock)
            raise

    # What is left to do.

    @property
    def is_fresh(self) -> bool:
        return self.journal.num_done == 0

    @property
    def is_published(self) -> bool:
        """Whether the output exists, in the requested order and format."""
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
        """The state of a job that has nothing left to do."""
        has_expired = self.journal.num_errors and any(record.error == EXPIRED for record in self.journal.records())
        return "expired" if has_expired else "completed"

    def is_done(self, index: int) -> bool:
        """Whether the line is skipped."""
        return self.journal.is_done(index) and index not in self.redone

    def has_result(self, index: int) -> bool:
        """Whether the line is done, and repeated if this pass repeats it."""
        return self.journal.is_done(index) and (
            index not in self.redone or self.journal.last_attempt(index) >= self.current.number
        )

    def _find_lost_lines(self) -> list[int]:
        """Lines in flight when the previous process was killed."""
        earlier = self._earlier
        if earlier is None or earlier.state != "running":
            return []
        lines = lines_in_flight(self.path / IN_FLIGHT_NAME, epoch=earlier.epoch)
        return [line for line in lines or () if not self.has_result(line)]

    @property
    def epoch(self) -> int:
        return self._epoch

    def failure_log(self) -> FailureLog:
        return FailureLog(
            self.path / FAILURE_LOG_NAME,
            epoch=self._epoch,
            first_epoch=self._first_epoch,
            pass_number=self.current.number,
        )

    @property
    def is_cancelled(self) -> bool:
        return (self.path / CANCEL).exists()

    # Running.

    def begin(self, *, template: str | None = None, num_expected: int | None = None) -> None:
        """Take the job over: an older process that still runs can write no more."""
        self._check_template(template)
        if self._earlier is None and self._discarded is None:
            remove_segments(self.path)  # left over from a removal that was interrupted
            sync_directory(self.path.parent)
        self._manifest.write(
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
                auto_settings=self._job.auto_settings,
            )
        )
        remove_segments(self.path, before_epoch=self._first_epoch)
        for name in (STATUS_NAME, f"{STATUS_NAME}.tmp"):  # written by an earlier process
            (self.path / name).unlink(missing_ok=True)
        if self._job.overwrite:
            (self.path / CANCEL).unlink(missing_ok=True)
        self.journal.guard(self._manifest.is_ours)

    def _check_template(self, template: str | None) -> None:
        """The template is known only once the model is open; a run without a model keeps the earlier value."""
        known = self._earlier.fingerprint.get(TEMPLATE) if self._earlier else None
        self._fingerprint[TEMPLATE] = template or known
        if known is not None:
            check_fingerprint(self._job, self._fingerprint, self._earlier)

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

    def journal_fields(self, errors: Counter[str]) -> dict[str, Any]:
        """Fields of `JobStatus` by which `job_view` decides later whether the status is still right."""
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

    def checked(self, batches: Iterable[list[InputLine]]) -> Iterator[list[InputLine]]:
        """The batches of the input. Refuses one that changes while it is read."""
        return self._watch.checked(batches)

    def publish(self, state: State = "completed") -> None:
        """Finish a job without lines left: commit, merge into the output, rename, and set the final state."""
        self.journal.commit()
        self._watch.check()
        crash_points.reach("input-ended")
        in_order = self._job.keep_order
        publish(
            self.journal.output_lines(in_order=in_order),
            self._job.output,
            format=self._output_format,
            directory=self.path,
            num_results=self.journal.num_done,
        )
        manifest = self._manifest.written
        assert manifest is not None
        self._manifest.write(
            replace(manifest, state=state, published_in_order=in_order, published_format=self._output_format)
        )
        (self.path / CANCEL).unlink(missing_ok=True)  # too late
        crash_points.reach("completed")

    def stop(self, state: State, reason: str) -> None:
        """Commit the results so far and record why the job stops."""
        self.journal.commit()
        if self._manifest.written is not None:
            self._manifest.write(self._manifest.written.with_state(state, reason))
        if state == "cancelled":
            (self.path / CANCEL).unlink(missing_ok=True)

    def close(self) -> None:
        self.journal.close()
        self._watch.close()
        _leave(self.path, self._lock)

    def is_ours(self) -> bool:
        """Whether no other process has taken the job over."""
        return self._manifest.is_ours()


class _Replayed:
    """Collects facts from the records of a journal while it is replayed."""

    def __init__(self, directory: Path) -> None:
        self.ids = DoneIds(directory)
        self.errors: Counter[str] = Counter()  # by code; counts all results of a line

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
            f"the job in {path} was cancelled; 'headrace cancel --undo {path}' lets it continue, --overwrite starts "
            "over"
        )


def _leave(path: Path, lock: JobLock) -> None:
    """Removes a directory in which no job was started."""
    if not manifest_path(path).exists():
        (path / "lock").unlink(missing_ok=True)
    lock.release()
    try:
        path.rmdir()
    except OSError:
        pass  # it holds a job


def _full_name(path: str) -> str:
    return path if is_url(path) else os.path.realpath(local_path(path))
