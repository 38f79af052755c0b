"""Lines on stderr. A stream that can no longer be written (a pipe whose reader has gone, a full disk) ends no command:
the job or the server matters more than its messages."""

from __future__ import annotations

import os
import sys


def print_line(line: str) -> None:
    print_text(f"headrace: {line}")


def print_text(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # it has gone, or was closed
        pass


def open_missing_stderr() -> None:
    """With `2>&-`, file descriptor 2 would be given to the next file or socket, and a child process would write to it.
    Python sets `sys.stderr` to None then."""
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
