"""Reads parts of files on several threads, through a few buffers of fixed size.

    file ──preadv, NUM_READERS threads──▶ tensor                       same type, on a CPU: straight to its place
                                     └──▶ buffer ──convert──▶ tensor   another type, or transposed
                                     └──▶ pinned buffer ──asynchronous copy, convert on the GPU──▶ tensor

The bytes of a sliced matrix that are not asked for are not read. Staging takes NUM_READERS * PIECE_BYTES at most,
whatever the size of the model: the page cache keeps what is read ahead.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 4 << 20  # read at once; large enough that a thread switch for each costs nothing
NUM_READERS = 8  # disks and network stores need several requests at a time
READ_AHEAD_BYTES = 256 << 20  # while earlier tensors are converted and packed


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a stored matrix, or a range of columns of them."""

    offset: int  # of the first byte in the file
    row_bytes: int  # to read of each row
    stride: int  # bytes from one row to the next
    num_rows: int
    first_row: int  # counted from the first row that was asked for

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.num_rows

    @property
    def extents(self) -> Iterator[tuple[int, int, int]]:
        """Offset in the file, start and end in the buffer, for each contiguous part."""
        if self.row_bytes == self.stride or self.num_rows == 1:
            yield self.offset, 0, self.num_bytes
            return
        for row in range(self.num_rows):
            yield self.offset + row * self.stride, row * self.row_bytes, (row + 1) * self.row_bytes


def pieces_of(offset: int, *, row_bytes: int, stride: int, num_rows: int) -> list[Piece]:
    """Divides rows into pieces of at most PIECE_BYTES, or of one row."""
    rows_at_once = max(1, PIECE_BYTES // row_bytes)
    return [
        Piece(offset + first * stride, row_bytes, stride, min(rows_at_once, num_rows - first), first)
        for first in range(0, num_rows, rows_at_once)
    ]


class OpenFile:
    """A file that is closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        self.num_bytes = os.fstat(self._descriptor).st_size
        self._num_advised = 0  # bytes from the start that were asked for ahead of their use
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, piece: Piece, buffer: memoryview) -> int:
        """Reads a piece into the start of `buffer`. Returns its number of bytes."""
        for offset, start, end in piece.extents:
            self._read(offset, buffer[start:end])
        return piece.num_bytes

    def _read(self, offset: int, buffer: memoryview) -> None:
        while len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelError(f"{self.path} ends at byte {offset:,}, within a tensor; fetch it again")
            buffer, offset = buffer[count:], offset + count

    def read_ahead(self, start: int) -> None:
        """Has the system read what follows byte `start` into the page cache, and returns at once."""
        end = min(self.num_bytes, start + READ_AHEAD_BYTES)
        if end - self._num_advised < min(READ_AHEAD_BYTES // 2, self.num_bytes - start) or not _CAN_ADVISE:
            return
        start = max(start, self._num_advised)
        self._num_advised = end
        # The call waits while the disk's queue is full.
        threading.Thread(
            target=self._advise, args=(start, end - start), name="headrace-read-ahead", daemon=True
        ).start()

    def _advise(self, start: int, num_bytes: int) -> None:
        with suppress(OSError):  # the file system does not read ahead
            os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)


_CAN_ADVISE = hasattr(os, "posix_fadvise")


class Buffer:
    """Host memory for one piece, pinned if it is copied to a GPU."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        import torch

        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._view = self._bytes.numpy().data
        self._copied: Any = None  # an event after the last copy from it, on a GPU

    def read(self, file: OpenFile, piece: Piece) -> tuple[Piece, Buffer]:
        if self._copied is not None:
            self._copied.synchronize()
        file.read_into(piece, self._view)
        return piece, self

    def rows(self, piece: Piece, dtype: Any) -> Tensor:  # [rows, columns]
        return self._bytes[: piece.num_bytes].view(dtype).view(piece.num_rows, -1)

    def release(self, device: Any) -> None:
        """Notes that all copies from the buffer were submitted to `device`."""
        if device.type == "cuda":
            import torch

            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))


class FileReader:
    """Reads pieces into tensors, and counts the bytes. Used by one thread at a time."""

    def __init__(self) -> None:
        self.num_bytes_read = 0
        self._buffers: deque[Buffer] = deque()
        self._are_pinned = False

    def fill(self, file: OpenFile, pieces: list[Piece], out: Tensor) -> None:
        """Reads rows straight into `out` [rows, columns], which has the stored type and lies on a CPU."""
        target = out.view(-1).view(_uint8()).numpy().data
        tasks = [(piece, target[piece.first_row * piece.row_bytes :]) for piece in pieces]
        if len(tasks) == 1:
            self.num_bytes_read += file.read_into(*tasks[0])
            return
        with _threads(len(pieces)) as pool:
            self.num_bytes_read += sum(pool.map(lambda task: file.read_into(*task), tasks))

    def staged(self, file: OpenFile, pieces: list[Piece], dtype: Any, device: Any) -> Iterator[tuple[Piece, Tensor]]:
        """Yields each piece as a tensor [rows, columns] of the stored type, in order. It may be used until the next one
        is asked for; copies to `device` may still be under way then."""
        buffers = self._buffers_for(pieces, is_pinned=device.type == "cuda")
        for piece, buffer in _read_ahead(buffers, file, pieces):
            self.num_bytes_read += piece.num_bytes
            yield piece, buffer.rows(piece, dtype)
            buffer.release(device)

    def _buffers_for(self, pieces: list[Piece], *, is_pinned: bool) -> Sequence[Buffer]:
        """The buffer that was used last comes last: its copy to a GPU may still be under way."""
        largest = max(piece.num_bytes for piece in pieces)
        if largest > PIECE_BYTES:  # one row that is larger
            return [Buffer(largest, is_pinned=is_pinned)]
        if is_pinned != self._are_pinned:
            self._buffers, self._are_pinned = deque(), is_pinned
        needed = min(NUM_READERS, len(pieces) if not is_pinned else NUM_READERS)
        while len(self._buffers) < needed:
            self._buffers.append(Buffer(PIECE_BYTES, is_pinned=is_pinned))
        self._buffers.rotate(-1)
        return self._buffers


def _read_ahead(buffers: Sequence[Buffer], file: OpenFile, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Buffer]]:
    if len(pieces) == 1:  # no thread is worth its start
        yield buffers[0].read(file, pieces[0])
        return
    with _threads(len(pieces)) as pool:
        yield from _in_order(pool, buffers, file, pieces)


def _in_order(
    pool: ThreadPoolExecutor, buffers: Iterable[Buffer], file: OpenFile, pieces: Iterable[Piece]
) -> Iterator[tuple[Piece, Buffer]]:
    """Reads one piece ahead for each buffer. A buffer is filled again when its piece was used."""
    remaining = iter(pieces)
    reading: deque[Future[tuple[Piece, Buffer]]] = deque(
        pool.submit(buffer.read, file, piece) for buffer, piece in zip(buffers, remaining, strict=False)
    )
    while reading:
        piece, buffer = reading.popleft().result()
        yield piece, buffer
        for following in islice(remaining, 1):
            reading.append(pool.submit(buffer.read, file, following))


def _threads(num_pieces: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(NUM_READERS, num_pieces), "headrace-read")


def _uint8() -> Any:
    import torch

    return torch.uint8
