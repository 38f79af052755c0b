"""Sets of lines, with one bit for each line of a job."""

from __future__ import annotations

from collections.abc import Iterable

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
