"""Which lines have a result, and which of a line's results counts, in one byte per line.

An answer replaces an error and a later attempt an earlier one; an error never replaces an answer. Of two results of
the same attempt, the first counts.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.jobs.formats.line_index import Bitmap
from headrace.jobs.store.record import Record, decode
from headrace.jobs.store.segments import Segment

MAX_ATTEMPT = 127  # checked when a pass is started

_IS_ERROR = 0x80  # a bit of the line's byte; the others are the attempt whose result counts, 0 if there is none
_MISSING = -1
_OFFSET_BITS = 40


class Committed:
    """Built by replaying segments, then updated with each new record."""

    def __init__(self) -> None:
        self._lines = bytearray()
        self._failed_later: dict[int, int] = {}  # answered lines with a later attempt that failed: its number
        self.has_repeats = False  # some line has several results
        self.num_done = 0
        self.num_errors = 0

    def add(self, index: int, attempt: int, *, is_error: bool) -> bool:
        """Returns False if the line already has a result of this attempt or a later one."""
        lines = self._lines
        if index >= len(lines):
            lines.extend(bytes(max(index + 1 - len(lines), len(lines) // 8, 1024)))
        line = lines[index]
        if line == 0:
            self.num_done += 1
            self.num_errors += is_error
            lines[index] = attempt | (_IS_ERROR if is_error else 0)
            return True
        self.has_repeats = True
        if attempt <= max(line & ~_IS_ERROR, self._failed_later.get(index, 0)):
            return False
        was_error = bool(line & _IS_ERROR)
        if is_error and not was_error:
            self._failed_later[index] = attempt
        else:
            self._lines[index] = attempt | (_IS_ERROR if is_error else 0)
            self.num_errors += is_error - was_error
        return True

    def is_done(self, index: int) -> bool:
        return index < len(self._lines) and self._lines[index] != 0

    def last_attempt(self, index: int) -> int:
        """0 if there is none yet."""
        if index >= len(self._lines):
            return 0
        return max(self._lines[index] & ~_IS_ERROR, self._failed_later.get(index, 0))

    def _counts(self, record: Record) -> bool:
        is_error = _IS_ERROR if record.error is not None else 0
        return record.index < len(self._lines) and self._lines[record.index] == record.attempt | is_error

    def records(self, segments: Iterable[Segment]) -> Iterator[Record]:
        """The results that count, one per line, in the order of commit."""
        seen = Bitmap()
        for segment in segments:
            for record, _ in segment.records():
                if record is None:
                    continue
                if not self.has_repeats or (self._counts(record) and seen.add(record.index)):
                    yield record

    def records_in_order(self, segments: Iterable[Segment]) -> Iterator[Record]:
        """The same in the order of the input. Takes eight bytes per line; results stay on disk."""
        filled = [segment for segment in segments if segment.path.stat().st_size]
        places = self._places(filled)
        files = [_mapped(segment.path) for segment in filled]
        try:
            for place in places:
                if place != _MISSING:
                    file, start = files[place >> _OFFSET_BITS], place & (1 << _OFFSET_BITS) - 1
                    record = decode(file[start : file.find(b"\n", start) + 1])
                    assert record is not None
                    yield record
        finally:
            for file in files:
                file.close()

    def _places(self, segments: list[Segment]) -> array[int]:
        """Returns for each line the segment and the offset of its result, packed into one integer."""
        places = array("q", [_MISSING]) * len(self._lines)
        for number, segment in enumerate(segments):
            start = 0
            for record, end in segment.records():
                if record is not None and self._counts(record) and places[record.index] == _MISSING:
                    places[record.index] = number << _OFFSET_BITS | start
                start = end
        return places


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def replay(segments: Iterable[Segment]) -> Committed:
    """Reads segments without changing them."""
    committed = Committed()
    for segment in segments:
        for record, _ in segment.records():
            if record is not None:
                committed.add(record.index, record.attempt, is_error=record.error is not None)
    return committed
