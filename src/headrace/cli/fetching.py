"""Download progress of models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.config import EMBEDDED_MODEL

if TYPE_CHECKING:
    from headrace.models.sources import Progress


def fetch_if_missing(model: str, *, quiet: bool = False) -> None:
    """Fetch the default model with a progress bar. For hub models huggingface_hub shows its own."""
    from headrace.models.cache import embedded_path
    from headrace.models.sources import fetch

    if model != EMBEDDED_MODEL or embedded_path().exists():
        return
    with fetch_progress(model, enabled=not quiet) as progress:
        fetch(model, progress=progress)


@contextmanager
def fetch_progress(name: str, *, enabled: bool = True) -> Iterator[Progress | None]:
    """Show a progress bar on a terminal, one line elsewhere, both on stderr."""
    if not enabled:
        yield None
    elif not sys.stderr.isatty():
        print(f"headrace: fetching {name} ...", file=sys.stderr, flush=True)
        yield None
    else:
        with _bar(name) as progress:
            yield progress


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(TextColumn("headrace: fetching {task.description}"), *columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)

        def show(num_bytes: int, total: int | None) -> None:
            bars.update(task, completed=num_bytes, total=total)

        yield show
