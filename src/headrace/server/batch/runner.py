"""Carries batches from state to state, on two threads:

    clerk     validates; ends batches that are cancelled, or whose time is over, while they wait; stops the one that
              runs if a more urgent one is ready
    worker    runs one batch after the other, by priority, then oldest first, and writes its files

A batch that is stopped for a more urgent one starts no more lines, those in flight may finish, and it goes on later.
Every step can be repeated: after a crash, `start` goes on from the stored states and the journals of the jobs.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from headrace.config import EngineConfig
from headrace.errors import EngineDeadError, HeadraceError, JobError, ResumableJobError
from headrace.jobs import crash_points
from headrace.jobs.files import is_no_room, sync_directory
from headrace.jobs.recovery.job_engine import Start
from headrace.jobs.run.deadline import Deadline
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.directory import CANCEL
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.manifest import manifest_path, read_manifest
from headrace.jobs.store.status_file import STATUS_NAME, read_status
from headrace.openai.parser_names import AUTOMATIC, ParserNames
from headrace.server.batch.records import FILE_ID, NEXT, STATUSES, Batch, Counts, LineError, Status, StoredFile, new_id
from headrace.server.batch.results import Written, write_results
from headrace.server.batch.store import BatchStore, StoreFullError
from headrace.server.batch.validation import validate

POLL_S = 1.0  # between two rounds in which nothing was done
RETRY_S = 5.0  # after a failure that may pass: a full disk, an engine that restarts
JOIN_S = 20.0  # for the threads to end, lines in flight included
OUTPUT_LIFE_S = 30 * 24 * 3600
SWEEP_S = 3600.0  # between two removals of expired files

log = logging.getLogger("headrace.batch")

StartFor = Callable[[Batch], list[Start]]  # how the job of a batch gets its engines, each one a worker


class BatchRunner:
    """Owns the two threads. `start_for` gives the engines of the server, which other requests use too, and `adapters`
    the directories of the LoRA adapters that are loaded now, by name."""

    def __init__(
        self,
        store: BatchStore,
        config: EngineConfig,
        start_for: StartFor,
        *,
        model_name: str,
        max_requests: int,
        other_names: Collection[str] = (),
        adapters: Callable[[], Mapping[str, str]] = dict,
        parser_names: ParserNames = AUTOMATIC,
        on_close: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._config = config
        self._start_for = start_for
        self._model_name = model_name
        self._other_names = other_names
        self._adapters = adapters
        self._max_requests = max_requests
        self._parser_names = parser_names
        self._on_close = on_close
        self._clock = clock
        self._closing = threading.Event()
        self._has_work = threading.Condition()
        self._num_wakes = 0
        self._claimed: set[str] = set()  # batches that one of the threads works on
        self._stop_run: Callable[[], None] | None = None  # of the job that runs
        self._overtakable: Batch | None = None  # the batch whose job runs, until it is stopped
        self.num_by_status: dict[str, int] = dict.fromkeys(STATUSES, 0)  # of all batches, at most POLL_S old
        self.num_answered = 0  # lines of batches that have ended since the start
        self.num_failed = 0
        self._deadlines: dict[str, Deadline] = {}
        self._retry_at: dict[str, float] = {}  # batches that wait after a failure
        self._reasons: dict[str, str] = {}  # why they wait, as logged
        # Of jobs that go on: a run removes the status of the one before, and writes its own a second later.
        self._counts_before: dict[str, Counts] = {}
        self._started_at, self._started_monotonic = clock(), time.monotonic()
        self._swept_at = self._started_monotonic
        self._threads = [
            threading.Thread(target=self._loop, args=(step,), name=f"headrace-batch-{name}", daemon=True)
            for name, step in (("clerk", self._clerk), ("worker", self._work))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> bool:
        """Stop: no new line starts. Unfinished batches go on at the next start. Returns whether all threads ended."""
        self._closing.set()
        self._on_close()
        self.wake()
        stop = self._stop_run
        if stop is not None:
            stop()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def wake(self) -> None:
        """There is a new batch, or another change."""
        with self._has_work:
            self._num_wakes += 1
            self._has_work.notify_all()

    def cancel(self, batch_id: str) -> None:
        """A batch is now `cancelling`. Its job, if it runs, starts no more lines."""
        try:
            (self._job(batch_id) / CANCEL).touch()
        except FileNotFoundError:
            pass  # it has not started
        self.wake()

    def counts_now(self, batch: Batch) -> Counts | None:
        """From the job that runs; None: those of the record are right."""
        if batch.status not in ("in_progress", "finalizing", "cancelling"):
            return None
        try:
            status = read_status(self._job(batch.id) / STATUS_NAME)
        except JobError:
            return self._counts_before.get(batch.id)
        num_failed = sum((status.error_lines or {}).values())
        return Counts(batch.counts.total, max(0, status.lines_done - num_failed), num_failed)

    # ---- threads

    def _loop(self, step: Callable[[], bool]) -> None:
        """Repeat a step. It returns whether it did something; if not, wait to be woken."""
        while not self._closing.is_set():
            with self._has_work:
                seen = self._num_wakes
            try:
                if step():
                    continue
            except Exception:  # the edge of this thread: it must not end
                log.exception("a batch could not be worked on; trying again")
                self._closing.wait(RETRY_S)
            with self._has_work:
                if self._num_wakes == seen and not self._closing.is_set():
                    self._has_work.wait(POLL_S)

    def _clerk(self) -> bool:
        self._sweep()
        has_done = False
        for batch in self._store.unfinished():
            if self._closing.is_set():
                return False
            with self._claim(batch.id) as is_ours:
                if is_ours:
                    has_done |= self._attend(batch)
        self._let_urgent_overtake()
        self.num_by_status = {**dict.fromkeys(STATUSES, 0), **self._store.count_by_status()}
        return has_done

    def _let_urgent_overtake(self) -> None:
        running, stop = self._overtakable, self._stop_run
        if running is None or stop is None:
            return
        waiting = [batch for batch in self._store.unfinished() if batch.status == "in_progress" and self._is_due(batch)]
        if waiting and waiting[0].priority < running.priority:
            log.info("batch %s waits for %s, which is more urgent", running.id, waiting[0].id)
            self._overtakable = None
            stop()

    def _is_due(self, batch: Batch) -> bool:
        return time.monotonic() >= self._retry_at.get(batch.id, 0.0)

    def _attend(self, batch: Batch) -> bool:
        deadline = self._deadline(batch)
        if batch.status == "validating":
            self._validate(batch)
        elif not self._is_due(batch):
            return False
        elif batch.status == "cancelling":
            self._finish(batch, "cancelled")
        elif batch.status == "in_progress" and deadline.is_over:
            self._run(batch)  # needs no engine: all lines that are left become error lines
        else:
            return False
        return True

    def _work(self) -> bool:
        for batch in self._store.unfinished():
            if batch.status in ("in_progress", "finalizing") and self._is_due(batch):
                with self._claim(batch.id) as is_ours:
                    if is_ours:
                        self._run(batch)
                        return True
        return False

    @contextmanager
    def _claim(self, batch_id: str) -> Iterator[bool]:
        """Whether this thread may work on the batch. Its state is read again by whoever changes it."""
        with self._has_work:
            is_ours = batch_id not in self._claimed
            if is_ours:
                self._claimed.add(batch_id)
        try:
            yield is_ours
        finally:
            if is_ours:
                with self._has_work:
                    self._claimed.discard(batch_id)

    def _sweep(self) -> None:
        """Delete expired files, the first time some time after the start: the clock may be wrong then. It may also jump
        later, so that a file has to be expired by the clock of the start too."""
        if time.monotonic() - self._swept_at >= SWEEP_S:
            self._swept_at = time.monotonic()
            by_start = self._started_at + time.monotonic() - self._started_monotonic
            self._store.delete_expired_files(int(min(self._clock(), by_start)))

    # ---- states

    def _validate(self, batch: Batch) -> None:
        loaded = dict(self._adapters())
        found = validate(
            self._input(batch.id),
            endpoint=batch.endpoint,
            model_name=self._model_name,
            max_requests=self._max_requests,
            other_names=self._other_names,
            adapters=loaded,
        )
        if found.errors:
            self._move(batch, "failed", "validating", errors=found.errors)
            self._remove_job(batch.id)
            return
        self._move(
            batch,
            "in_progress",
            "validating",
            model=self._model_name,
            adapters={name: str(Path(loaded[name]).expanduser().absolute()) for name in sorted(found.adapters)},
            counts=Counts(found.num_lines),
        )
        crash_points.reach("batch-validated")
        self.wake()

    def _run(self, batch: Batch) -> None:
        current = self._store.batch(batch.id)
        if current is None or current.status not in ("in_progress", "finalizing"):
            return
        if current.status == "in_progress":
            final = self._run_job(current)
            if final is None:
                return
            crash_points.reach("batch-job-ended")
            if final != "completed":
                self._finish(current, final)
                return
            self._move(current, "finalizing", "in_progress")  # no effect if it was cancelled just now
            crash_points.reach("batch-finalizing")
        self._finish(current, "completed")

    def _run_job(self, batch: Batch) -> Status | None:
        """Run the job of a batch as far as it goes. Returns the final state of the batch; None: it goes on later."""
        starts = self._start_for(batch)
        counts = self.counts_now(batch)
        if counts is not None:
            self._counts_before[batch.id] = counts
        try:
            run_job(
                self._spec(batch, num_workers=len(starts)),
                start=starts,
                has_own_process=True,
                quiet=True,
                deadline=self._deadline(batch),  # the clock may jump between here and the first step
                on_begin=partial(self._begun, batch),
            )
        except (ResumableJobError, EngineDeadError) as error:
            self._retry_later(batch.id, str(error))
            return None
        except HeadraceError as error:
            if self._status_of(batch.id) == "cancelling":
                return None  # the clerk ends it
            log.error("batch %s has failed: %s", batch.id, error)
            self._finish(batch, "failed", errors=[LineError("job_failed", str(error))])
            return None
        finally:
            self._stop_run = self._overtakable = None
        manifest = read_manifest(self._job(batch.id))
        if manifest is None or not manifest.is_done:
            return None  # stopped, or cancelled
        return "expired" if manifest.state == "expired" else "completed"

    def _begun(self, batch: Batch, stop: Callable[[], None]) -> None:
        """The job's directory exists now. A stop or a cancel that came before could not reach the job."""
        self._stop_run, self._overtakable = stop, batch
        self._reasons.pop(batch.id, None)
        if self._closing.is_set():
            stop()
        if self._status_of(batch.id) == "cancelling":
            self.cancel(batch.id)
        self.wake()  # a more urgent batch may have become ready meanwhile

    def _retry_later(self, batch_id: str, reason: str) -> None:
        if self._reasons.get(batch_id) != reason:  # it may be the same for hours
            log.warning("batch %s waits: %s", batch_id, reason)
        self._reasons[batch_id] = reason
        self._retry_at[batch_id] = time.monotonic() + RETRY_S

    def _spec(self, batch: Batch, *, num_workers: int) -> JobSpec:
        # The clock was read when the batch was first seen: if it jumps later, the window stays as long as it was.
        ends_at = time.time() + self._deadline(batch).seconds_left
        return JobSpec(
            input=str(self._input(batch.id)),
            output=str(self._store.job_path(batch.id) / "results.jsonl"),
            config=self._config_with(self._adapters_of(batch)),
            model_names=(self._model_name, *self._other_names),
            workers=num_workers,
            input_format="jsonl",
            output_format="jsonl",
            max_error_rate=1.0,
            deadline=datetime.fromtimestamp(ends_at, UTC).isoformat(),
            disk_wait_s=24 * 3600.0,
            parser_names=self._parser_names,
        )

    def _config_with(self, adapters: dict[str, str]) -> EngineConfig:
        """For the job, which loads no adapters: their names are what lines may ask for, and their files are compared
        when the job is resumed."""
        return replace(self._config, lora_modules=adapters or None, max_loras=None)

    def _adapters_of(self, batch: Batch) -> dict[str, str]:
        """The directories from which the batch's adapters are loaded now. One that was loaded while the server ran is
        not there after a restart, until it is loaded again: the batch waits for it."""
        loaded = self._adapters()
        missing = [name for name in batch.adapters if name not in loaded]
        if missing and not self._deadline(batch).is_over:
            raise ResumableJobError(
                f"its lines name the adapter {missing[0]!r}, which is not loaded; load it, for instance from "
                f"{batch.adapters[missing[0]]}, or cancel the batch"
            )
        return {name: loaded.get(name, directory) for name, directory in batch.adapters.items()}

    def _deadline(self, batch: Batch) -> Deadline:
        """Never later than the window from now, whatever the clock says after a restart."""
        if batch.id not in self._deadlines:
            window_s = batch.expires_at - batch.created_at
            self._deadlines[batch.id] = Deadline(min(batch.expires_at, time.time() + window_s))
        return self._deadlines[batch.id]

    def _finish(self, batch: Batch, final: Status, *, errors: list[LineError] | None = None) -> None:
        """Write the files of what is done, then add them and change the state in one transaction."""
        files: list[StoredFile] = []
        try:
            written, files = self._write_files(batch)
            counts = Counts(batch.counts.total, written.num_answers, written.num_errors)
            changes: dict[str, object] = {"counts": counts, "usage": written.usage, "errors": errors or []}
            for file in files:
                changes["output_file_id" if file.filename.endswith("_output.jsonl") else "error_file_id"] = file.id
            crash_points.reach("batch-files-written")
            self._move_to_end(batch.id, final, changes, files)
        except (OSError, StoreFullError) as error:
            for file in files:
                self._store.file_path(file.id).unlink(missing_ok=True)
            if isinstance(error, OSError) and not is_no_room(error):
                raise
            self._retry_later(batch.id, "its files cannot be written, the disk is full; trying again")
            return
        crash_points.reach("batch-ended")
        self.num_answered += written.num_answers
        self.num_failed += written.num_errors
        log.info("batch %s is %s: %d answers, %d errors", batch.id, final, written.num_answers, written.num_errors)
        self._remove_job(batch.id)

    def _move_to_end(self, batch_id: str, final: Status, changes: dict[str, object], files: list[StoredFile]) -> None:
        """A batch that is cancelled just before its end is cancelled."""
        for status in (final, *(("cancelled",) if final != "cancelled" else ())):
            since = [before for before, following in NEXT.items() if status in following]
            if self._store.move(batch_id, status, since=since, change=lambda stored: changes, files=files) is not None:
                return
        raise AssertionError("a claimed batch was changed by another thread")

    def _write_files(self, batch: Batch) -> tuple[Written, list[StoredFile]]:
        job, now = self._job(batch.id), int(self._clock())
        has_job = manifest_path(job).exists()
        paths = {kind: self._store.upload_path(f"{batch.id}_{kind}.jsonl") for kind in ("output", "error")}
        try:
            written = write_results(view_job(job).records() if has_job else (), *paths.values())
            files = []
            for path, count in zip(paths.values(), (written.num_answers, written.num_errors), strict=True):
                if not count:
                    continue
                file = StoredFile(
                    id=new_id(FILE_ID),
                    owner=batch.owner,
                    num_bytes=path.stat().st_size,
                    created_at=now,
                    expires_at=now + (batch.output_expires_after_s or OUTPUT_LIFE_S),
                    filename=path.name,
                    purpose="batch_output",
                )
                os.replace(path, self._store.file_path(file.id))
                files.append(file)
            sync_directory(self._store.path / "files")
        finally:
            for path in paths.values():
                path.unlink(missing_ok=True)
        return written, files

    # ---- small things

    def _move(self, batch: Batch, status: Status, since: Status, **changes: object) -> None:
        """Nothing happens if the batch was cancelled meanwhile."""
        self._store.move(batch.id, status, since=(since,), change=lambda stored: changes)

    def _status_of(self, batch_id: str) -> Status | None:
        batch = self._store.batch(batch_id)
        return None if batch is None else batch.status

    def _input(self, batch_id: str) -> Path:
        return self._store.job_path(batch_id) / "input.jsonl"

    def _job(self, batch_id: str) -> Path:
        return self._store.job_path(batch_id) / "results.jsonl.job"

    def _remove_job(self, batch_id: str) -> None:
        self._deadlines.pop(batch_id, None)
        self._retry_at.pop(batch_id, None)
        self._reasons.pop(batch_id, None)
        self._counts_before.pop(batch_id, None)
        shutil.rmtree(self._store.job_path(batch_id), ignore_errors=True)
