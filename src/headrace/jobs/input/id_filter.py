"""Finds ids that were used before, and on which line, in little memory: a file may have millions of them.

recent ids       a dictionary; when it is full it becomes a sorted run
runs             two runs of similar size are merged; a long run moves to an unnamed temporary file
Bloom filter     two bits per id; an id that it does not contain is looked up in no run
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.int64]
LineNumbers = npt.NDArray[np.int64]

RECENT = 65_536
MAX_RUN = 1 << 20  # runs are not merged past this length: a merge takes several times their memory
BLOCK_KEYS = 512  # keys that one read of a file run returns
FILTER_BITS = 28  # log2 of the filter's bits: 32 MB, of which few ids touch few pages


class IdFilter:
    """Ids are compared by a 64-bit hash: among 20 million ids, a false match has a chance of 1 in 90,000."""

    def __init__(
        self,
        recent: int = RECENT,
        *,
        max_run: int = MAX_RUN,
        filter_bits: int = FILTER_BITS,
        directory: Path | None = None,
    ) -> None:
        """Files of long runs are created in `directory`, or in the default directory for temporary files."""
        self._max_recent = recent
        self._max_run = max_run
        self._filter_bits = filter_bits
        self._directory = directory
        self._recent: dict[int, int] = {}
        self._long_runs: list[_Run | _FileRun] = []
        self._runs: list[_Run] = []  # longest first
        self._filter: _BloomFilter | None = None  # over all runs

    def add(self, ids: Sequence[str], numbers: Sequence[int]) -> list[int | None]:
        """Returns for each id the line number of its first use; None: this is its first use, which is now recorded."""
        keys = [hash(name) for name in ids]
        earlier = self._find_in_runs(keys)
        recent = self._recent
        found: list[int | None] = []
        for place, (key, number) in enumerate(zip(keys, numbers, strict=True)):
            first = earlier.get(place) or recent.setdefault(key, number)
            found.append(None if first == number else first)
        if len(recent) >= self._max_recent:
            self._start_run()
        return found

    def _should_merge(self) -> bool:
        if len(self._runs) < 2:
            return False
        earlier, last = len(self._runs[-2].keys), len(self._runs[-1].keys)
        return earlier < 2 * last and earlier + last <= self._max_run

    def _find_in_runs(self, keys: list[int]) -> dict[int, int]:
        """Line numbers of the keys that are in a run, by their positions in `keys`."""
        if self._filter is None:
            return {}
        hashes = np.array(keys, np.int64)
        places = np.flatnonzero(self._filter.may_have(hashes))
        if not len(places):
            return {}
        found: dict[int, int] = {}
        for place in places.tolist():
            for run in (*self._runs, *self._long_runs):
                number = run.find(keys[place])
                if number is not None:
                    found[place] = number
                    break
        return found

    def _start_run(self) -> None:
        keys = np.fromiter(self._recent.keys(), np.int64, len(self._recent))
        numbers = np.fromiter(self._recent.values(), np.int64, len(self._recent))
        self._recent = {}
        self._filter = self._filter or _BloomFilter(self._filter_bits)
        self._filter.add(keys)
        self._runs.append(_Run.sorted(keys, numbers))
        while self._should_merge():
            *self._runs, one, other = self._runs
            both = _Run.sorted(np.concatenate([one.keys, other.keys]), np.concatenate([one.numbers, other.numbers]))
            self._runs.append(both)
        if 2 * len(self._runs[-1].keys) > self._max_run:  # no other run will be merged with it
            self._long_runs.append(self._runs.pop().in_file(self._directory))


@dataclass(frozen=True, slots=True)
class _Run:
    keys: Hashes  # sorted, unique
    numbers: LineNumbers

    @classmethod
    def sorted(cls, keys: Hashes, numbers: LineNumbers) -> _Run:
        order = np.argsort(keys, kind="stable")
        return cls(keys[order], numbers[order])

    def find(self, key: int) -> int | None:
        place = int(np.searchsorted(self.keys, key))
        return int(self.numbers[place]) if place < len(self.keys) and self.keys[place] == key else None

    def in_file(self, directory: Path | None) -> _Run | _FileRun:
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  the run owns it
            file.write(self.keys.tobytes())
            file.write(self.numbers.tobytes())
            file.flush()
        except OSError:
            return self  # no space: it stays in memory
        run = _FileRun(file, len(self.keys), self.keys[::BLOCK_KEYS].copy())
        weakref.finalize(run, file.close)
        return run


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _FileRun:
    """A run in a file: all keys, then all line numbers. Looking up a key reads one block."""

    file: IO[bytes]
    num_keys: int
    firsts: Hashes  # the first key of each block

    def find(self, key: int) -> int | None:
        block = int(np.searchsorted(self.firsts, key, "right")) - 1
        if block < 0:
            return None
        start = block * BLOCK_KEYS
        keys = self._read(start, min(BLOCK_KEYS, self.num_keys - start))
        place = int(np.searchsorted(keys, key))
        if place == len(keys) or keys[place] != key:
            return None
        return int(self._read(self.num_keys + start + place, 1)[0])

    def _read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(os.pread(self.file.fileno(), 8 * count, 8 * start), np.int64)


class _BloomFilter:
    """`may_have` is true for every id that was added, and for few others."""

    def __init__(self, num_bits: int) -> None:
        self._mask = (1 << num_bits) - 1
        self._bytes = np.zeros(1 << (num_bits - 3), np.uint8)

    def add(self, hashes: Hashes) -> None:
        for bits in self._bits(hashes):
            np.bitwise_or.at(self._bytes, bits >> 3, _bit_of(bits))

    def may_have(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        first, second = ((self._bytes[bits >> 3] & _bit_of(bits)) != 0 for bits in self._bits(hashes))
        both: npt.NDArray[np.bool_] = first & second
        return both

    def _bits(self, hashes: Hashes) -> tuple[Hashes, Hashes]:
        return hashes & self._mask, (hashes >> 32) & self._mask


def _bit_of(bits: Hashes) -> npt.NDArray[np.uint8]:
    return (1 << (bits & 7)).astype(np.uint8)
