"""The journal of a job: the results themselves, each appended once. No index or counter beside it can disagree with it.

    append ──▶ buffered ──▶ written: survives the process ──▶ synced: survives the machine
                      flush                         256 results or 50 ms

Opening it replays the segments and cuts a torn tail; the first write starts a segment of the new epoch. On a full disk,
results that could not be written stay buffered, and results that were written but not synced are buffered again:
`flush` can be called until it succeeds.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from time import monotonic

from headrace.errors import JobError
from headrace.jobs import crash_points
from headrace.jobs.files import is_no_room, job_error, sync_directory
from headrace.jobs.store.committed import Committed
from headrace.jobs.store.record import Record, encode
from headrace.jobs.store.segments import Segment, find_segments, segment_path
from headrace.jobs.store.syncer import Syncer

GROUP_RESULTS = 256
GROUP_SECONDS = 0.05
MAX_UNSYNCED = 16 * GROUP_RESULTS  # past this, `flush` waits for the disk
SEGMENT_BYTES = 1 << 30

Watch = Callable[[Record], None]
Entry = tuple[int, int, str | None, bytes]  # the arguments of `encode`, which runs for a whole batch


class Journal:
    """Owned by the process that holds the job's lock; used by one thread."""

    def __init__(
        self, directory: Path, *, epoch: int, committed: Committed, segments: list[Segment], num_damaged: int
    ) -> None:
        self.epoch = epoch
        self.num_damaged = num_damaged  # records that replay skipped; their lines are computed again
        self.num_bytes = sum(segment.end or 0 for segment in segments)
        self._directory = directory
        self._committed = committed
        self._segments = segments
        self._buffered: list[Entry] = []
        self._unsynced: deque[tuple[int, list[Entry]]] = deque()  # batches, each with `_num_written` after it
        self._number = 0
        self._descriptor: int | None = None
        self._syncer: Syncer | None = None
        self._size = 0
        self._num_written = 0  # in the current segment
        self._num_requested = 0
        self._requested_at = monotonic()
        self._may_write: Callable[[], bool] = lambda: True

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        epoch: int,
        first_epoch: int = 0,
        sealed: Mapping[str, int] | None = None,
        watch: Watch | None = None,
    ) -> Journal:
        """`sealed`: sizes of segments when a later epoch started. `watch` is called with each replayed record."""
        committed, segments, num_damaged = Committed(), [], 0
        for segment in find_segments(directory, epochs=range(first_epoch, epoch), sealed=sealed or {}):
            end, bad = _replay(segment, committed, watch)
            num_damaged += bad
            segments.append(Segment(segment.path, segment.epoch, segment.number, end))
        return cls(directory, epoch=epoch, committed=committed, segments=segments, num_damaged=num_damaged)

    def guard(self, may_write: Callable[[], bool]) -> None:
        """`may_write` is called before each write: False once another process has taken the job over."""
        self._may_write = may_write

    @property
    def sealed(self) -> dict[str, int]:
        """The segments of earlier epochs, and how many bytes of each count."""
        return {segment.name: segment.end or 0 for segment in self._segments if segment.epoch < self.epoch}

    @property
    def num_done(self) -> int:
        return self._committed.num_done

    @property
    def num_errors(self) -> int:
        return self._committed.num_errors

    @property
    def has_repeats(self) -> bool:
        """Whether some line has several results."""
        return self._committed.has_repeats

    @property
    def num_unsynced(self) -> int:
        return len(self._buffered) + (self._num_written - self._syncer.num_synced if self._syncer else 0)

    @property
    def num_buffered(self) -> int:
        """Results that are not written yet."""
        return len(self._buffered)

    def buffered_errors(self) -> Counter[str]:
        """Errors among the buffered results, by code."""
        return Counter(error for _, _, error, _ in self._buffered if error is not None)

    @property
    def num_buffered_bytes(self) -> int:
        """Approximate size of the buffered results."""
        return sum(len(entry[3]) + 40 for entry in self._buffered)

    def is_done(self, index: int) -> bool:
        return self._committed.is_done(index)

    def last_attempt(self, index: int) -> int:
        return self._committed.last_attempt(index)

    def append(self, index: int, result: bytes, attempt: int = 1, error: str | None = None) -> bool:
        """Returns False if the line already has a result of this attempt: the new one is counted and dropped."""
        if not self._committed.add(index, attempt, is_error=error is not None):
            return False
        self._buffered.append((index, attempt, error, result))
        crash_points.reach("appended")
        return True

    def flush(self) -> None:
        """Write the buffered results. Request a sync once the group is large or old enough."""
        if self._buffered:
            self._write_buffered()
        if self._syncer is None:
            return
        self._check(self._syncer)
        if self._num_written - self._num_requested >= GROUP_RESULTS or self.seconds_to_flush == 0.0:
            self._request_sync(self._syncer)
        if self.num_unsynced >= MAX_UNSYNCED:
            self.commit()

    @property
    def seconds_to_flush(self) -> float | None:
        """Seconds until `flush` must be called; None: nothing to flush."""
        if not self._buffered and self._num_written == self._num_requested:
            return None
        return max(0.0, self._requested_at + GROUP_SECONDS - monotonic())

    def commit(self) -> None:
        """Flush and wait for the disk: afterwards everything appended is synced."""
        if self._buffered:
            self._write_buffered()
        if self._syncer is not None:
            self._request_sync(self._syncer)
            self._syncer.wait()
            self._check(self._syncer)
        crash_points.reach("synced")

    def close(self) -> None:
        """Drops buffered results that were not flushed."""
        self._buffered.clear()
        if self._syncer is not None:
            self._syncer.close()
            self._syncer = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def results(self) -> Iterator[tuple[int, bytes]]:
        """Committed results, one per line, in the order of commit."""
        return ((record.index, record.result) for record in self.records())

    def records(self, *, in_order: bool = False) -> Iterator[Record]:
        reading = self._committed.records_in_order if in_order else self._committed.records
        return reading(self._segments)

    def output_lines(self, *, in_order: bool) -> Iterator[bytes]:
        """The same without indexes, for the output."""
        if in_order or self.num_damaged or self._committed.has_repeats:
            return (record.result for record in self.records(in_order=in_order))
        return chain.from_iterable(segment.results() for segment in self._segments)

    # Writing.

    def _write_buffered(self) -> None:
        if not self._may_write():
            if not self._directory.exists():
                raise JobError(
                    f"the job directory {self._directory} was removed while the job ran; its results are lost with it: "
                    "run the job again"
                )
            raise JobError(
                f"another process has taken over the job in {self._directory}; this one (epoch {self.epoch}) stops "
                f"without writing {len(self._buffered):,} results, which the other computes itself"
            )
        data = b"".join([encode(*entry) for entry in self._buffered])
        try:
            if self._descriptor is None or self._size >= SEGMENT_BYTES:
                self._start_segment()
            self._write(data)
        except OSError as error:
            raise self._failure(error) from error
        self._size += len(data)
        self.num_bytes += len(data)
        self._num_written += len(self._buffered)
        self._unsynced.append((self._num_written, self._buffered))
        self._buffered = []
        self._forget_synced()
        crash_points.reach("written")

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        if crash_points.is_armed("write-half"):
            os.write(self._descriptor, data[: len(data) // 2])
            crash_points.reach("write-half")
            data = data[len(data) // 2 :]
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _start_segment(self) -> None:
        if self._descriptor is not None:
            self._end_segment()
        self._number += 1
        path = segment_path(self._directory, self.epoch, self._number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            sync_directory(self._directory)
        except OSError:
            os.close(descriptor)
            raise
        crash_points.reach("segment-created")
        self._segments.append(Segment(path, self.epoch, self._number, None))
        self._descriptor, self._syncer = descriptor, Syncer(descriptor)
        self._size = self._num_written = self._num_requested = 0

    def _end_segment(self) -> None:
        """Sync and close the current segment, which is full."""
        assert self._descriptor is not None and self._syncer is not None
        self._request_sync(self._syncer)
        self._syncer.wait()
        self._check(self._syncer)
        self._unsynced.clear()
        self._leave_segment()

    def _leave_segment(self) -> None:
        assert self._descriptor is not None and self._syncer is not None
        self._syncer.close()
        os.close(self._descriptor)
        self._descriptor = self._syncer = None

    def _forget_synced(self) -> None:
        num_synced = self._syncer.num_synced if self._syncer is not None else 0
        while self._unsynced and self._unsynced[0][0] <= num_synced:
            self._unsynced.popleft()

    def _request_sync(self, syncer: Syncer) -> None:
        self._num_requested = self._num_written
        self._requested_at = monotonic()
        syncer.request(self._num_written)

    def _check(self, syncer: Syncer) -> None:
        failure = syncer.failure
        if failure is None:
            return
        if is_no_room(failure):
            self._rebuffer_unsynced()
        raise self._failure(failure) from failure

    def _rebuffer_unsynced(self) -> None:
        """After a failed sync the contents on disk are unknown: write these results again, to another segment. If both
        copies exist, the first counts."""
        self._forget_synced()
        self._buffered = [entry for _, entries in self._unsynced for entry in entries] + self._buffered
        self._unsynced.clear()
        self._committed.has_repeats = True
        self._leave_segment()
        self._num_written = self._num_requested = 0

    def _failure(self, error: OSError) -> JobError:
        """Half a record may have been written: cut it off, so that the segment stays readable."""
        if not is_no_room(error):
            self._buffered.clear()
        if self._descriptor is not None:
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                self._rebuffer_unsynced()  # the next replay cuts it
        return job_error(
            f"the job's journal in {self._directory} cannot be written: {error.strerror}; what was committed is kept",
            error,
        )


def _replay(segment: Segment, committed: Committed, watch: Watch | None) -> tuple[int, int]:
    """Returns where the last complete record ends and how many damaged ones are before it. Cuts off what follows."""
    end = num_damaged = num_bad = 0
    for record, offset in segment.records():
        if record is None:
            num_bad += 1
            continue
        committed.add(record.index, record.attempt, is_error=record.error is not None)
        if watch is not None:
            watch(record)
        end, num_damaged = offset, num_bad
    if segment.end is None:
        _cut(segment.path, end)
        crash_points.reach("tail-cut")
    return end, num_damaged


def _cut(path: Path, end: int) -> None:
    """Truncate the file and sync the rest, which may have been written by a process that died before its sync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size > end:
            os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    except OSError as error:
        raise JobError(f"the job's journal {path} cannot be repaired: {error.strerror}") from error
    finally:
        os.close(descriptor)
