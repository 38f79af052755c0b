"""Reads pieces of files ahead of their use, into a few buffers of fixed size.

    announced pieces ──one for each buffer──▶ threads read ──in order──▶ taken, copied ──▶ the buffer reads the next one

Pieces may belong to many tensors and files: the disk has something to do until the last one is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Sized(Protocol):
    @property
    def num_bytes(self) -> int: ...


class Readable(Protocol):
    """A file from which pieces are read."""

    def read_into(self, piece: Any, buffer: memoryview) -> int: ...


class Buffer:
    """Host memory for one piece, pinned if it is copied to a GPU."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        import torch

        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._view = self._bytes.numpy().data
        self._copied: Any = None  # an event after the last copy from it, on a GPU

    def read(self, file: Readable, piece: Sized) -> Buffer:
        if self._copied is not None:
            self._copied.synchronize()
        file.read_into(piece, self._view)
        return self

    def rows(self, num_rows: int, num_bytes: int, dtype: Any) -> Tensor:  # [rows, columns]
        return self._bytes[:num_bytes].view(dtype).view(num_rows, -1)

    def release(self, device: Any) -> None:
        """Notes that all copies from the buffer were submitted to `device`."""
        if device.type == "cuda":
            import torch

            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))


class ReadAhead:
    """Owns the buffers, and the threads while there is something to read. Used by one thread."""

    def __init__(self, *, num_buffers: int, buffer_bytes: int, num_threads: int, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self._shape = (num_buffers, buffer_bytes)
        self._num_threads = num_threads
        self._announced: deque[tuple[Readable, Sized]] = deque()
        self._reading: deque[tuple[Readable, Sized, Future[Buffer]]] = deque()
        self._free: deque[Buffer] = deque()  # the one that was used last comes last: its copy may be under way
        self._num_buffers = 0  # allocated so far
        self._threads: ThreadPoolExecutor | None = None

    @property
    def is_empty(self) -> bool:
        return not self._announced and not self._reading

    def announce(self, file: Readable, pieces: Sequence[Sized]) -> None:
        self._announced.extend((file, piece) for piece in pieces)

    def is_next(self, file: Readable, piece: Sized) -> bool:
        """Whether this is the piece to be taken next."""
        queue = self._reading or self._announced
        return bool(queue) and queue[0][0] is file and queue[0][1] == piece

    def take(self) -> Buffer:
        """Waits for the next piece. Its buffer is given back when it was used."""
        self._submit()
        return self._reading.popleft()[2].result()

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._submit()
        if self.is_empty and self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    def _submit(self) -> None:
        """Has the next pieces read, one for each buffer that is free."""
        num_buffers, buffer_bytes = self._shape
        while self._announced and (self._free or self._num_buffers < num_buffers):
            if not self._free:
                self._free.append(Buffer(buffer_bytes, is_pinned=self.is_pinned))
                self._num_buffers += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, "headrace-read")
            file, piece = self._announced.popleft()
            self._reading.append((file, piece, self._threads.submit(self._free.popleft().read, file, piece)))
