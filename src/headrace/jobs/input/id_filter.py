"""Which ids were seen before, and on which line, in memory that hardly grows: a file may have millions.

recent ids    a dictionary
full ones     become sorted runs; short runs of like size become one, long ones go to a file that has no name
a filter      two bits an id: ids that it does not know are looked up in no run
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
MAX_RUN = 1 << 20  # two runs are not joined into a longer one: that would take several times their memory for a moment
BLOCK_KEYS = 512  # of a run in a file, read at once
FILTER_BITS = 28  # as a power of two: 32 MB, of which few ids touch little


class SeenIds:
    """Ids are known by 64 bits of hash: among 20 million, two alike by chance are a matter of 1 in 90,000."""

    def __init__(
        self,
        recent: int = RECENT,
        *,
        max_run: int = MAX_RUN,
        filter_bits: int = FILTER_BITS,
        directory: Path | None = None,
    ) -> None:
        """Long runs are kept in the directory, or where temporary files are."""
        self._max_recent = recent
        self._max_run = max_run
        self._filter_bits = filter_bits
        self._directory = directory
        self._recent: dict[int, int] = {}
        self._long_runs: list[_Run | _FileRun] = []
        self._runs: list[_Run] = []  # larger ones first
        self._filter: _Filter | None = None  # of the runs

    def add(self, ids: Sequence[str], numbers: Sequence[int]) -> list[int | None]:
        """For each id the line number it was first seen with, or None: then it is remembered with its own."""
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

    def _last_two_are_joined(self) -> bool:
        if len(self._runs) < 2:
            return False
        earlier, last = len(self._runs[-2].keys), len(self._runs[-1].keys)
        return earlier < 2 * last and earlier + last <= self._max_run

    def _find_in_runs(self, keys: list[int]) -> dict[int, int]:
        """The line numbers of those that a run has, by their places."""
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
        self._filter = self._filter or _Filter(self._filter_bits)
        self._filter.add(keys)
        self._runs.append(_Run.sorted(keys, numbers))
        while self._last_two_are_joined():
            *self._runs, one, other = self._runs
            both = _Run.sorted(np.concatenate([one.keys, other.keys]), np.concatenate([one.numbers, other.numbers]))
            self._runs.append(both)
        if 2 * len(self._runs[-1].keys) > self._max_run:  # no other will be joined to it
            self._long_runs.append(self._runs.pop().in_file(self._directory))


@dataclass(frozen=True, slots=True)
class _Run:
    keys: Hashes  # in their order, each once
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
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  it is the run's
            file.write(self.keys.tobytes())
            file.write(self.numbers.tobytes())
            file.flush()
        except OSError:
            return self  # no room: then it stays in memory
        run = _FileRun(file, len(self.keys), self.keys[::BLOCK_KEYS].copy())
        weakref.finalize(run, file.close)
        return run


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _FileRun:
    """One read for a key, whatever the length."""

    file: IO[bytes]
    num_keys: int
    firsts: Hashes  # of each block

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


class _Filter:
    """Says of all ids that were added that it may have them, and of few others."""

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
