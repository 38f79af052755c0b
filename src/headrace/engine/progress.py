"""A progress line on the terminal for `LLM.generate`: requests, tokens per second, cache hits, time left."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.engine.core import EngineStats

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_INTERVAL_SECONDS = 10.0
NARROW_COLUMNS = 120


class GenerateProgress:
    """A live bar on a terminal, a plain line every ten seconds elsewhere, nothing when disabled. Writes to stderr."""

    def __init__(self, num_requests: int, *, enabled: bool = True) -> None:
        self._num_requests = num_requests
        self._stream = sys.stderr
        self._enabled = enabled
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started_at = perf_counter()
        self._last_line_at = self._started_at
        self._num_done = 0

    def __enter__(self) -> GenerateProgress:
        if self._enabled and self._stream.isatty():
            self._bar, self._task = _live_bar(self._num_requests)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, num_done: int, stats: EngineStats) -> None:
        self._num_done = num_done
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=num_done, details=self._details(stats))
        elif self._enabled and perf_counter() - self._last_line_at >= PLAIN_INTERVAL_SECONDS:
            self._last_line_at = perf_counter()
            print(self._plain_line(stats), file=self._stream, flush=True)

    def _details(self, stats: EngineStats) -> str:
        scheduler, seconds = stats.scheduler, max(1e-9, perf_counter() - self._started_at)
        parts = [
            f"in {scheduler.num_prompt_tokens / seconds:,.0f} tok/s",
            f"out {scheduler.num_generated_tokens / seconds:,.0f} tok/s",
            f"cache hits {scheduler.prefix_hit_share:.0%}",
            f"running {scheduler.num_running}",
        ]
        return " · ".join(parts)

    def _plain_line(self, stats: EngineStats) -> str:
        return (
            f"headrace: {self._num_done:,}/{self._num_requests:,} requests · {self._details(stats)}{self._time_left()}"
        )

    def _time_left(self) -> str:
        if not self._num_done:
            return ""
        seconds = (perf_counter() - self._started_at) / self._num_done * (self._num_requests - self._num_done)
        return f" · {seconds:,.0f} s left"


def _live_bar(num_requests: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    details = TextColumn("{task.fields[details]}")
    columns = [BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    if console.width < NARROW_COLUMNS:  # leave out the bar: the numbers matter more
        columns = [MofNCompleteColumn(), TimeRemainingColumn()]
    bar = Progress(TextColumn("[bold]headrace"), *columns, details, console=console, refresh_per_second=4)
    return bar, bar.add_task("requests", total=num_requests, details="starting")
