"""The disk tier: blocks of the host tier in files, which later processes find again.

One thread writes, a few read. The engine's thread never waits for them: `write` refuses a block when the queue is full,
and what was read or written is asked for (`finished`). Whatever goes wrong with a file costs a block, never an answer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, time

from headrace.errors import ConfigError
from headrace.kv.disk_files import BadBlockError, BlockFiles, Bytes
from headrace.kv.tiers import Finished, Side

MAX_QUEUED_BYTES = 1 << 30  # of blocks that wait to be written
NUM_READERS = 4
TRIMMED_SHARE = 0.9  # of the limit that is left when it was exceeded: so that files are listed seldom
CLOSING_POLL_S = 0.1
PAUSE_S = 30.0  # without writing, after the disk refused to be written to

_log = logging.getLogger(__name__)


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
        self._max_queued = max(8, MAX_QUEUED_BYTES // max(1, memory.shape[1]))
        try:
            self._files.prepare(about)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"kv_offload_path={str(root)!r} cannot be written to ({reason}); give another directory"
            ) from error
        self._index = set(self._files.digests())
        self._num_bytes: int | None = None  # of all files; None: they have to be listed
        self._paused_until = 0.0
        self._warned: set[str] = set()
        self._done: deque[Finished] = deque()
        self._has_done = threading.Event()
        self._queue: deque[tuple[bytes, int, int] | None] = deque()  # None: forget all files
        self._changed = threading.Condition()
        self._is_closing = False
        self._readers = ThreadPoolExecutor(NUM_READERS, "headrace-kv-read")
        self._writer = threading.Thread(target=self._run, name="headrace-kv-write", daemon=True)
        self._writer.start()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def __len__(self) -> int:
        return len(self._index)

    def write(self, digest: bytes, place: int, step: int) -> bool:
        """Queue a block for writing; False: the queue is full, or the disk was refused a short while ago."""
        with self._changed:
            if self._is_closing or len(self._queue) >= self._max_queued or monotonic() < self._paused_until:
                return False
            self._queue.append((digest, place, step))
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
            self._queue.append(None)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all queued blocks are written, for so long at most; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, seconds)

    def close(self) -> None:
        """End the threads, after the files that they have begun."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._writer.join()
        self._readers.shutdown(cancel_futures=True)

    # ---- the threads

    def _run(self) -> None:
        self._make_room(0)
        while self._has_more():
            item = self._queue[0]  # where it stays until it is done: `flush` waits for it
            if item is None:
                self._delete_all()
            else:
                self._end("written", item[0], is_good=self._write(*item))
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _has_more(self) -> bool:
        """Wait for the next item; False: it is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._queue)
            return not self._is_closing

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
            self._make_room(self._memory.shape[1])
            num_bytes = self._files.write(digest, self._memory[place])
        except OSError as error:
            self._paused_until = monotonic() + PAUSE_S
            self._num_bytes = None
            self._warn(
                "write",
                f"KV blocks cannot be written to {self._files.root} ({error.strerror or error}); they are dropped, and "
                f"writing is tried again every {PAUSE_S:.0f} s",
            )
            return False
        self._num_bytes = (self._num_bytes or 0) + num_bytes
        self._index.add(digest)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Delete old files if the limit would be exceeded. Other processes write here too, so all are listed then."""
        if self._num_bytes is None or self._num_bytes + num_bytes > self._max_bytes:
            is_first, limit = self._num_bytes is None, self._max_bytes - num_bytes
            self._num_bytes, removed = self._files.trim(limit if is_first else int(limit * TRIMMED_SHARE), time())
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
        self._done.append(Finished(side, digest, is_good))
        self._has_done.set()

    def _delete_all(self) -> None:
        for digest in list(self._files.digests()):
            self._files.remove(digest)
        self._num_bytes = None

    def _warn(self, kind: str, message: str) -> None:
        """Once for each kind: a bad disk would fill the log."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s (later ones of this kind are only counted)", message)
