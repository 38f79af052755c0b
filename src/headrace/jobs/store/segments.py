"""The files of a journal: `seg-<epoch>-<n>.jsonl`, one record per line, only ever appended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.jobs.store.record import Record, decode, results_of

BUFFER_BYTES = 1 << 20
RESULTS_BYTES = 1 << 18  # per read: small enough to stay in the processor's cache

_NAME = re.compile(r"seg-(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    epoch: int
    number: int
    end: int | None  # later bytes were written by a process that had lost the job; None: all bytes count

    @property
    def name(self) -> str:
        return self.path.name

    def records(self) -> Iterator[tuple[Record | None, int]]:
        """Each record, None if it is damaged, with the offset after it."""
        offset = 0
        with open(self.path, "rb", buffering=BUFFER_BYTES) as file:
            for line in file:
                offset += len(line)
                if self.end is not None and offset > self.end:
                    return
                yield decode(line), offset

    def results(self) -> Iterator[bytes]:
        """The results of an undamaged segment, several times faster than `records`."""
        left = self.path.stat().st_size if self.end is None else self.end
        with open(self.path, "rb") as file:
            while left > 0:
                lines = file.read(min(left, RESULTS_BYTES))
                if len(lines) < left:
                    lines += file.readline()
                left -= len(lines)
                yield from results_of(lines)


def segment_path(directory: Path, epoch: int, number: int) -> Path:
    return directory / f"seg-{epoch:06}-{number:04}.jsonl"


def find_segments(directory: Path, *, epochs: range, sealed: Mapping[str, int]) -> list[Segment]:
    """Returns segments in the order of writing. Epochs before the range were discarded by --overwrite. Within it only
    the last epoch may have segments that are not sealed: others were written by a process that had lost the job."""
    found = [(path, match) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    segments = [Segment(path, int(match[1]), int(match[2]), sealed.get(path.name)) for path, match in found]
    counted = [s for s in segments if s.epoch in epochs and (s.end is not None or s.epoch == epochs[-1])]
    return sorted(counted, key=lambda s: (s.epoch, s.number))


def remove_segments(directory: Path, *, before_epoch: int | None = None) -> None:
    """Remove the segments of discarded epochs, or all."""
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and (before_epoch is None or int(match[1]) < before_epoch):
            path.unlink()
