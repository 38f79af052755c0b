"""A set of row numbers in one bit each."""

from __future__ import annotations


class Bitmap:
    def __init__(self) -> None:
        self._bits = bytearray()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & 1 << (index & 7))

    def add(self, index: int) -> bool:
        """False: it was there."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits) // 8, 1024)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._len += 1
        return True
