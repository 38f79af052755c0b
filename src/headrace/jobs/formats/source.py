"""What every input is to a job: lines with an index, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from headrace.jobs.formats.identity import SourceIdentity
from headrace.jobs.formats.reader import InputLine

Skip = Callable[[int], bool]


class Source(Protocol):
    """Rows of tables come as JSON objects, so that whoever takes lines need not know of formats."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Of a table; None where each line has its own."""

    @property
    def is_appendable(self) -> bool:
        """Whether lines can be added at its end without changing those before."""

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        """Of its first `size` bytes, or all. None for a stream, which nobody can read again."""

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        """From line `start` on, at most `limit` lines that are not blank, without those that `skip` names (which the
        limit counts all the same)."""

    def line_at(self, index: int) -> InputLine | None:
        """None past the end. Refused by streams and compressed files."""

    def estimate_num_lines(self) -> int | None: ...

    def close(self) -> None: ...
