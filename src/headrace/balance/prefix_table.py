"""Who has computed the prefix of a prompt: hashes of the prompt's chunks, and who got them.

    hashes    h0 = H(seed, chunk 0)    h1 = H(h0, chunk 1)    h2 = H(h1, chunk 2)      a chain: same hash, same prefix
    table     h0: A, B                 h1: A, B               h2: A                    matched: A 3 chunks, B 2

A chunk is some bytes of a request's body for the router, and a block of tokens for a server with several engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_ENTRIES = 1 << 17  # the table then takes about 20 MB


def chunk_hashes(data: bytes, seed: int, *, chunk_bytes: int, max_chunks: int) -> list[int]:
    """For each full chunk, the hash of all data up to its end.

    Python's own hash of bytes has 64 bits and a key of this process: nobody outside can find two equal ones.
    """
    state, hashes = seed, []
    for start in range(0, min(len(data) // chunk_bytes, max_chunks) * chunk_bytes, chunk_bytes):
        state = hash((state, data[start : start + chunk_bytes]))
        hashes.append(state)
    return hashes


class PrefixTable:
    """The holders of each chunk, as a bit mask of their numbers; the least recently used are dropped."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def clear(self) -> None:
        self._holders.clear()

    def matched(self, hashes: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """For each holder, by its number, how many chunks from the start it was sent."""
        found = dict.fromkeys(numbers, 0)
        holders = sum(1 << number for number in found)
        for depth, each in enumerate(hashes):
            still = holders & self._holders.get(each, 0)
            for number in found:
                if (holders & ~still) >> number & 1:
                    found[number] = depth
            holders = still
            if not holders:
                break
        for number in found:
            if holders >> number & 1:
                found[number] = len(hashes)
        return [found[number] for number in numbers]

    def record(self, hashes: Sequence[int], number: int, *, live: int = -1) -> None:
        """Note that a holder computes this prefix. `live`: a mask of the numbers that are still in use."""
        for each in reversed(hashes):  # the start of a prompt last: it must not be dropped before what follows it
            self._holders[each] = self._holders.get(each, 0) & live | 1 << number
            self._holders.move_to_end(each)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)
