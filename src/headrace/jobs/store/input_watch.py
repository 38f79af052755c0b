"""Notices that the input changes while the job runs: truncated, overwritten in place, or replaced.

Each batch is checked after it was read and before it is used, so that no line of a changed input gets a result. The
check is one `stat` per batch; content is compared only if that shows a change. A removed file is still read as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from io import FileIO
from typing import NamedTuple

from headrace.errors import JobError
from headrace.jobs.formats import Source, SourceIdentity, what_changed
from headrace.jobs.formats.identity import identify_file
from headrace.jobs.formats.locations import is_url, local_path
from headrace.jobs.formats.reader import InputLine


class _Stamp(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int


class InputWatch:
    """Owned by the job's directory; used by the thread that reads, and after it has ended by the main loop."""

    def __init__(self, source: Source) -> None:
        """Call it before the identity is computed. A stream cannot be watched; an object has no stamp."""
        self._source = source
        self._known: SourceIdentity | None = None
        is_local = not is_url(source.name) and source.identity(0) is not None
        self._file = FileIO(local_path(source.name)) if is_local else None  # keeps the inode of a removed file
        self._stamp = self._stamp_now()
        self._compared_size = 0
        self._is_compare_due = False

    def begin(self, known: SourceIdentity | None) -> None:
        self._known = known

    def checked(self, batches: Iterable[list[InputLine]]) -> Iterator[list[InputLine]]:
        """The batches, as long as the input is the same."""
        for batch in batches:
            if self._file is not None and self._stamp_now() != self._stamp:
                self._take_stamp()
            yield batch
        self.check()

    def check(self) -> None:
        """Refuse an input that has changed in any way but lines added at its end."""
        if self._file is None or self._is_compare_due or self._stamp_now() != self._stamp:
            self._compare()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _take_stamp(self) -> None:
        """A file that grows all the time is compared each time its size has doubled, and at the end."""
        now, before = self._stamp_now(), self._stamp
        has_grown = now is not None and before is not None and now[:2] == before[:2] and now.size > before.size
        if has_grown and now is not None and self._source.is_appendable and now.size < 2 * self._compared_size:
            self._stamp, self._is_compare_due = now, True
        else:
            self._compare()

    def _compare(self) -> None:
        """Compare the content. The stamp is taken first: a change during the comparison is found by the next one."""
        stamp = self._stamp_now()
        change = None if self._known is None else self._change(self._known)
        if change is not None:
            fix = "restore the input and run the same command again to continue, or start over with --overwrite"
            if self._is_compare_due:  # it grew as well, so batches were used that were not compared
                fix = "some answers may be to changed lines: start over with --overwrite"
            raise JobError(f"the input has changed while the job was running: {change}; nothing is published; {fix}")
        self._stamp, self._is_compare_due = stamp, False
        self._compared_size = 0 if stamp is None else stamp.size

    def _change(self, known: SourceIdentity) -> str | None:
        try:
            return what_changed(self._source, known)
        except OSError:
            if self._file is None:
                return None  # an object that was read and cannot be found any more
        is_same = identify_file(self._file, self._source.name, known.size) == known
        return None if is_same else f"{self._source.name} was changed, then removed"

    def _stamp_now(self) -> _Stamp | None:
        if self._file is None:
            return None
        try:
            found = os.stat(local_path(self._source.name))
        except OSError:
            found = os.fstat(self._file.fileno())
        return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
