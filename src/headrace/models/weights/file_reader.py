"""Reads parts of files on several threads, through a few buffers of fixed size.

    file ──preadv, NUM_READERS threads──▶ tensor                       same type, on a CPU: straight to its place
                                     └──▶ buffer ──convert──▶ tensor   another type, or transposed
                                     └──▶ pinned buffer ──asynchronous copy, convert on the GPU──▶ tensor

The bytes of a sliced matrix that are not asked for are not read. Staging takes NUM_GPU_BUFFERS * PIECE_BYTES at most,
whatever the size of the model. A loader announces all reads before the first one: what goes through buffers is then
read ahead across tensors and files, while others are copied and packed (`read_ahead.py`). For what is read straight to
its place, the system is asked to read ahead into the page cache.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError
from headrace.models.weights.read_ahead import Buffer, ReadAhead

if TYPE_CHECKING:
    from torch import Tensor

PIECE_BYTES = 4 << 20  # read at once; large enough that a thread switch for each costs nothing
NUM_READERS = 8  # disks and network stores need several requests at a time
NUM_GPU_BUFFERS = 16  # of one piece each: those that are read, and those whose copy to the GPU is under way
# From here on the disk is asked for all of a read at once. Otherwise the system requests little by little: several
# threads with one descriptor look like random access to it.
MIN_ADVISED_BYTES = 1 << 20
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
            if end - start >= MIN_ADVISED_BYTES and _CAN_ADVISE:
                self._advise(offset, end - start)
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


class FileReader:
    """Reads pieces into tensors, and counts the bytes. Used by one thread at a time."""

    def __init__(self) -> None:
        self.num_bytes_read = 0
        self._ahead: ReadAhead | None = None
        self._announced_for: Any = None  # the device, while reads are announced
        self._was_announced = False  # what was read last

    @property
    def reads_ahead(self) -> bool:
        """Whether pieces like the last one are read ahead, so that the system need not be asked to."""
        return self._announced_for is not None or self._was_announced

    @contextmanager
    def announcing(self, device: Any) -> Iterator[None]:
        """Within this, nothing is read: what is asked for now will be asked for again in the same order, for `device`,
        and is read ahead then, across tensors and files."""
        self._ahead = _new_read_ahead(is_pinned=device.type == "cuda")
        self._announced_for = device
        try:
            yield
        finally:
            self._announced_for = None

    def target(self, out: Tensor) -> Any:
        """The device of `out`, or the one for which it stands while reads are announced."""
        return out.device if out.device.type != "meta" else self._announced_for

    def fill(self, file: OpenFile, pieces: list[Piece], out: Tensor) -> None:
        """Reads rows straight into `out` [rows, columns], which has the stored type and lies on a CPU."""
        if self._announced_for is not None:
            return
        self._was_announced = False
        target = out.view(-1).view(_uint8()).numpy().data
        tasks = [(piece, target[piece.first_row * piece.row_bytes :]) for piece in pieces]
        if len(tasks) == 1:
            self.num_bytes_read += file.read_into(*tasks[0])
            return
        with ThreadPoolExecutor(min(NUM_READERS, len(tasks)), "headrace-read") as pool:
            self.num_bytes_read += sum(pool.map(lambda task: file.read_into(*task), tasks))

    def staged(self, file: OpenFile, pieces: list[Piece], dtype: Any, device: Any) -> Iterator[tuple[Piece, Tensor]]:
        """Yields each piece as a tensor [rows, columns] of the stored type, in order. It may be used until the next one
        is asked for; copies to `device` may still be under way then."""
        fits = max(piece.num_bytes for piece in pieces) <= PIECE_BYTES  # else one row is larger
        if self._announced_for is not None:
            assert self._ahead is not None
            self._ahead.announce(file, pieces if fits else ())
            return
        self._was_announced = self._ahead is not None and self._ahead.is_next(file, pieces[0])
        if fits and (len(pieces) > 1 or self._was_announced):
            yield from self._from_ahead(file, pieces, dtype, device)
        else:  # no thread is worth its start
            yield from self._one_by_one(file, pieces, dtype, device)

    def _from_ahead(
        self, file: OpenFile, pieces: list[Piece], dtype: Any, device: Any
    ) -> Iterator[tuple[Piece, Tensor]]:
        ahead = self._ahead_of(file, pieces, is_pinned=device.type == "cuda")
        for piece in pieces:
            assert ahead.is_next(file, piece)
            buffer = ahead.take()
            self.num_bytes_read += piece.num_bytes
            yield piece, buffer.rows(piece.num_rows, piece.num_bytes, dtype)
            buffer.release(device)
            ahead.give_back(buffer)
        if ahead.is_empty and (ahead.is_pinned or self._was_announced):
            self._ahead = None  # its buffers are not needed again soon

    def _ahead_of(self, file: OpenFile, pieces: list[Piece], *, is_pinned: bool) -> ReadAhead:
        """What reads these pieces next. Announced ones that were not asked for in their turn are forgotten."""
        ahead = self._ahead
        if ahead is None or ahead.is_pinned != is_pinned or not (ahead.is_empty or ahead.is_next(file, pieces[0])):
            ahead = self._ahead = _new_read_ahead(is_pinned=is_pinned)
        if ahead.is_empty:
            ahead.announce(file, pieces)
        return ahead

    def _one_by_one(
        self, file: OpenFile, pieces: list[Piece], dtype: Any, device: Any
    ) -> Iterator[tuple[Piece, Tensor]]:
        buffer = Buffer(max(piece.num_bytes for piece in pieces), is_pinned=device.type == "cuda")
        for piece in pieces:
            buffer.read(file, piece)
            self.num_bytes_read += piece.num_bytes
            yield piece, buffer.rows(piece.num_rows, piece.num_bytes, dtype)
            buffer.release(device)


def _new_read_ahead(*, is_pinned: bool) -> ReadAhead:
    num_buffers = NUM_GPU_BUFFERS if is_pinned else NUM_READERS
    return ReadAhead(num_buffers=num_buffers, buffer_bytes=PIECE_BYTES, num_threads=NUM_READERS, is_pinned=is_pinned)


def _uint8() -> Any:
    import torch

    return torch.uint8
