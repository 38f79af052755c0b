"""Compact facts about every line: eight bytes for its offset, one bit for membership in a set."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

LINE_BREAK = 10
MIN_BYTES = 4096


class Bitmap:
    """A set of line indexes that grows as needed: 2.5 MB for 20 million."""

    def __init__(self, members: Iterable[int] = ()) -> None:
        self._bits = bytearray(MIN_BYTES)
        self._count = 0
        for index in members:
            self.add(index)

    def add(self, index: int) -> bool:
        """Returns False if it is already in the set."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits) // 2)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._count += 1
        return True

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & (1 << (index & 7)))

    def __len__(self) -> int:
        return self._count

    @property
    def num_bytes(self) -> int:
        return len(self._bits)


class LineOffsets:
    """Where the lines of a text start, found chunk by chunk."""

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.uint64]] = []
        self._ends = np.zeros(0, np.uint64)  # one past each line break
        self._num_bytes = 0

    def take(self, chunk: bytes) -> None:
        """Add the next chunk of the text."""
        breaks = np.flatnonzero(np.frombuffer(chunk, np.uint8) == LINE_BREAK)
        self._pieces.append(breaks.astype(np.uint64) + np.uint64(self._num_bytes + 1))
        self._num_bytes += len(chunk)

    def span(self, index: int) -> tuple[int, int] | None:
        """First byte of a line and the byte after its last, line break included; None past the end."""
        if self._pieces:
            self._ends = np.concatenate([self._ends, *self._pieces])
            self._pieces.clear()
        if index > len(self._ends):
            return None
        begin = int(self._ends[index - 1]) if index else 0
        end = int(self._ends[index]) if index < len(self._ends) else self._num_bytes
        return (begin, end) if begin < end else None

    @property
    def num_bytes(self) -> int:
        return int(self._ends.nbytes + sum(piece.nbytes for piece in self._pieces))
