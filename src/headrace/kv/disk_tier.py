"""The disk tier: blocks of the host tier in files, which later processes find again.

A few threads write, others read. The engine's thread never waits for them: `write` refuses a block when the queue is
full, and what was read or written is asked for (`finished`). Whatever goes wrong with a file costs a block, never an
answer. A thread spends its time in checksums and copies, which run beside those of other threads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import Final, Literal, NamedTuple

from headrace.errors import ConfigError
from headrace.kv.disk_files import BadBlockError, BlockFiles, Bytes
from headrace.kv.tiers import Finished, Side

MAX_QUEUED_BYTES = 1 << 30  # of blocks that wait to be written
NUM_WRITERS = 4
NUM_READERS = 8
TRIMMED_SHARE = 0.9  # of the limit that is left when it was exceeded: so that files are listed seldom
CLOSING_POLL_S = 0.1
PAUSE_S = 30.0  # without writing, after the disk refused to be written to

CLEAR: Final = "clear"  # in the queue: delete all files

_log = logging.getLogger(__name__)


class _Block(NamedTuple):
    """In the queue: write this block."""

    digest: bytes
    place: int
    step: int


_Item = _Block | Literal["clear"]


class DiskTier:
    """Owns the threads and the index of the files. Several processes may use one directory: each deletes the least
    recently used files when it finds too many, and takes a file that has gone as a miss."""

    def __init__(
        self,
        root: Path,
        domain: bytes,
        *,
        memory: Bytes,  # [num_places, bytes of a block]: the host tier
        wait_for_step: Callable[[int, float], bool],  # its copies, for so many seconds; returns whether they are done
        max_bytes: int,
        about: bytes = b"{}",
    ) -> None:
        self._files = BlockFiles(root, domain)
        self._memory = memory
        self._wait_for_step = wait_for_step
        self._max_bytes = max_bytes
        self._file_bytes = self._files.size_of(memory.shape[1])
        self._max_queued = max(8, MAX_QUEUED_BYTES // max(1, memory.shape[1]))
        try:
            self._files.prepare(about)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"kv_offload_path={str(root)!r} cannot be written to ({reason}); give another directory"
            ) from error
        self._index = set(self._files.digests())
        self._room = threading.Lock()  # for the next two, and for deleting old files
        self._num_bytes: int | None = None  # of all files, and of those being written; None: they have to be listed
        self._being_written: set[bytes] = set()
        self._paused_until = 0.0
        self._warned: set[str] = set()
        self._done: deque[Finished] = deque()
        self._has_done = threading.Event()
        self._queue: deque[_Item] = deque()
        self._begun: list[_Item] = []  # that have left the queue and are not done
        self._changed = threading.Condition()  # of the queue and of what has begun
        self._is_closing = False
        self._readers = ThreadPoolExecutor(NUM_READERS, "headrace-kv-read")
        self._writers = [
            threading.Thread(target=self._run, name=f"headrace-kv-write-{number}", daemon=True)
            for number in range(NUM_WRITERS)
        ]
        for writer in self._writers:
            writer.start()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def __len__(self) -> int:
        return len(self._index)

    def write(self, digest: bytes, place: int, step: int) -> bool:
        """Queue a block for writing; False: the queue is full, or the disk was refused a short while ago."""
        with self._changed:
            is_full = len(self._queue) + len(self._begun) >= self._max_queued
            if self._is_closing or is_full or monotonic() < self._paused_until:
                return False
            self._queue.append(_Block(digest, place, step))
            self._changed.notify_all()
        return True

    def read(self, digest: bytes, place: int, step: int) -> None:
        self._readers.submit(self._read, digest, place, step)

    def finished(self) -> Sequence[Finished]:
        self._has_done.clear()
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self, seconds: float) -> None:
        self._has_done.wait(seconds)

    def clear(self) -> None:
        """Forget and delete all files of the domain."""
        self._index.clear()
        with self._changed:
            self._queue.append(CLEAR)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all queued blocks are written, for so long at most; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._begun, seconds)

    def close(self) -> None:
        """End the threads, after the files that they have begun. Files that were to be deleted are."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for writer in self._writers:
            writer.join()
        if CLEAR in self._queue:
            self._delete_all()
        self._readers.shutdown(cancel_futures=True)

    # ---- the threads

    def _run(self) -> None:
        with self._room:
            self._make_room(0)
        while (item := self._next()) is not None:
            if item == CLEAR:
                self._delete_all()
            else:
                self._end("written", item.digest, is_good=self._write(*item))
            with self._changed:
                self._begun.remove(item)
                self._changed.notify_all()

    def _next(self) -> _Item | None:
        """Wait for the next item, and begin it; None: it is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._may_begin())
            if self._is_closing:
                return None
            item = self._queue.popleft()
            self._begun.append(item)
            return item

    def _may_begin(self) -> bool:
        """Files are deleted after all that was queued before, and before all that was queued later. A block is not
        written twice at once."""
        if not self._queue or CLEAR in self._begun:
            return False
        item = self._queue[0]
        return not self._begun if item == CLEAR else all(item.digest != other.digest for other in self._blocks_begun)

    @property
    def _blocks_begun(self) -> list[_Block]:
        return [item for item in self._begun if item != CLEAR]

    def _is_copied(self, step: int) -> bool:
        """Wait for the copies of a step; False if the tier is closed before."""
        while not self._wait_for_step(step, CLOSING_POLL_S):
            if self._is_closing:
                return False
        return True

    def _write(self, digest: bytes, place: int, step: int) -> bool:
        if not self._is_copied(step):
            return False
        try:
            with self._reserved(digest):
                self._files.write(digest, self._memory[place])
                self._index.add(digest)
        except OSError as error:
            self._paused_until = monotonic() + PAUSE_S
            with self._room:
                self._num_bytes = None
            self._warn(
                "write",
                f"KV blocks cannot be written to {self._files.root} ({error.strerror or error}); they are dropped, and "
                f"writing is tried again every {PAUSE_S:.0f} s",
            )
            return False
        return True

    @contextmanager
    def _reserved(self, digest: bytes) -> Iterator[None]:
        """Count a file before it is written, as others are at the same time; keep it until it is in the index."""
        with self._room:
            self._make_room(self._file_bytes)
            self._num_bytes = (self._num_bytes or 0) + self._file_bytes
            self._being_written.add(digest)
        try:
            yield
        finally:
            with self._room:
                self._being_written.remove(digest)

    def _make_room(self, num_bytes: int) -> None:
        """Delete old files if the limit would be exceeded. Other processes write here too, so all are listed then."""
        if self._num_bytes is None or self._num_bytes + num_bytes > self._max_bytes:
            num_begun = len(self._being_written) * self._file_bytes
            is_first, limit = self._num_bytes is None, self._max_bytes - num_begun - num_bytes
            max_bytes = limit if is_first else int(limit * TRIMMED_SHARE)
            num_left, removed = self._files.trim(max_bytes, time(), keep=self._being_written)
            self._num_bytes = num_left + num_begun
            self._index.difference_update(removed)

    def _read(self, digest: bytes, place: int, step: int) -> None:
        is_good = False
        try:
            if self._is_copied(step):
                self._files.read(digest, self._memory[place])
                is_good = True
        except FileNotFoundError:
            pass  # another process has deleted it
        except BadBlockError as error:
            self._files.remove(digest)
            self._warn("damaged", f"a KV block on disk was dropped: {self._files.path_of(digest)}: {error}")
        except OSError as error:
            self._warn("read", f"KV blocks cannot be read from {self._files.root}: {error.strerror or error}")
        if not is_good:
            self._index.discard(digest)
        self._end("read", digest, is_good=is_good)

    def _end(self, side: Side, digest: bytes, *, is_good: bool) -> None:
        self._done.append(Finished(side, digest, is_good, monotonic()))
        self._has_done.set()

    def _delete_all(self) -> None:
        for digest in list(self._files.digests()):
            self._files.remove(digest)
        self._index.clear()  # also of what was written since `clear` was called
        with self._room:
            self._num_bytes = None

    def _warn(self, kind: str, message: str) -> None:
        """Once for each kind: a bad disk would fill the log."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s (later ones of this kind are only counted)", message)
