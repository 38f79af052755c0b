"""Which ids were seen before, and on which line, in 16 bytes a line: a file may have millions.

Recent ids are in a dictionary; full dictionaries become sorted runs, and short runs of like size become one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.int64]
LineNumbers = npt.NDArray[np.int64]

RECENT = 65_536
MAX_RUN = 1 << 20  # two runs are not joined into a longer one: that would take several times their memory for a moment


class SeenIds:
    """Ids are known by 64 bits of hash: among 20 million, two alike by chance are a matter of 1 in 90,000."""

    def __init__(self, recent: int = RECENT, *, max_run: int = MAX_RUN) -> None:
        self._max_recent = recent
        self._max_run = max_run
        self._recent: dict[int, int] = {}
        self._runs: list[tuple[Hashes, LineNumbers]] = []  # each sorted by hash, larger ones first

    def add(self, ids: Sequence[str], numbers: Sequence[int]) -> list[int | None]:
        """For each id the line number it was first seen with, or None: then it is remembered with its own."""
        hashes = np.array([hash(name) for name in ids], np.int64)
        earlier = self._find_in_runs(hashes)
        found: list[int | None] = []
        for key, number, old in zip(hashes.tolist(), numbers, earlier.tolist(), strict=True):
            first = old or self._recent.setdefault(key, number)
            found.append(None if first == number else first)
        if len(self._recent) >= self._max_recent:
            self._start_run()
        return found

    def _last_two_are_joined(self) -> bool:
        if len(self._runs) < 2:
            return False
        earlier, last = len(self._runs[-2][0]), len(self._runs[-1][0])
        return earlier < 2 * last and earlier + last <= self._max_run

    def _find_in_runs(self, hashes: Hashes) -> LineNumbers:
        """The line number of each hash, 0 where no run has it."""
        found = np.zeros(len(hashes), np.int64)
        for keys, numbers in self._runs:
            places = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
            found = np.where(keys[places] == hashes, numbers[places], found)
        return found

    def _start_run(self) -> None:
        keys = np.fromiter(self._recent.keys(), np.int64, len(self._recent))
        numbers = np.fromiter(self._recent.values(), np.int64, len(self._recent))
        self._recent = {}
        self._runs.append(_sorted_run(keys, numbers))
        while self._last_two_are_joined():
            (keys, numbers), (more_keys, more_numbers) = self._runs[-2:]
            merged = _sorted_run(np.concatenate([keys, more_keys]), np.concatenate([numbers, more_numbers]))
            self._runs[-2:] = [merged]


def _sorted_run(keys: Hashes, numbers: LineNumbers) -> tuple[Hashes, LineNumbers]:
    order = np.argsort(keys, kind="stable")
    return keys[order], numbers[order]
