"""Column names of CSV and Parquet."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import JobError

MAX_SHOWN = 12


def check_columns(columns: Sequence[str], name: str) -> tuple[str, ...]:
    for place, column in enumerate(columns):
        if not column.strip():
            raise JobError(f"column {place + 1} of {name} has no name; the first line must be the header")
        if column in columns[:place]:
            raise JobError(f"{name} has two columns named {column!r}; rename one")
    return tuple(columns)


def shown(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - MAX_SHOWN} more" if len(columns) > MAX_SHOWN else ""
    return ", ".join(columns[:MAX_SHOWN]) + more
