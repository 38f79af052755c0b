"""The interface of all inputs: lines with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from headrace.jobs.formats.identity import SourceIdentity
from headrace.jobs.formats.reader import InputLine

Skip = Callable[[int], bool]


class Source(Protocol):
    """Rows of tables are returned as JSON objects, so that callers need not know formats."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of a table; None for JSON lines."""

    @property
    def is_appendable(self) -> bool:
        """Whether lines can be added at the end without changing the earlier ones."""

    def identity(self, size: int | None = None) -> SourceIdentity | None:
        """The identity of the first `size` bytes, or of all. None for a stream, which cannot be read again."""

    def read_batches(
        self, *, start: int = 0, limit: int | None = None, skip: Skip | None = None
    ) -> Iterator[list[InputLine]]:
        """Yields lines that are not blank: from line `start`, at most `limit`, without those for which `skip` is true
        (which still count for the limit)."""

    def estimate_num_lines(self) -> int | None: ...

    def close(self) -> None: ...
