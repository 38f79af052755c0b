"""Text on the terminal while a job runs: messages, and the status as a live view, or as a line every ten seconds where
the stream is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from headrace.jobs.status import workers
from headrace.jobs.status.gpus import progress_text
from headrace.jobs.store.status_file import JobStatus

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

PLAIN_INTERVAL_SECONDS = 10.0


class Console:
    """Writes to stderr by default; nothing at all when disabled. Inside its `with`, the live view is shown."""

    def __init__(
        self, *, enabled: bool = True, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._clock = clock
        self._updated_at = clock()
        self._live: Live | None = None

    def __enter__(self) -> Console:
        if self._enabled and self._stream.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            console = RichConsole(file=self._stream, highlight=False)
            self._live = Live(console=console, refresh_per_second=4, transient=True, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def tell(self, line: str) -> None:
        """A message to the user, above the live view if there is one."""
        if self._live is not None:
            self._live.console.print(f"headrace: {line}", markup=False)
        else:
            self.write(line)

    @property
    def terminal(self) -> TextIO | None:
        """The stream, if it is a terminal and shows anything."""
        return self._stream if self._enabled and self._stream.isatty() else None

    def write(self, line: str) -> None:
        """Write a message directly to the stream: takes no lock, so a signal handler may call it."""
        if self._enabled:
            try:
                self._stream.write(f"headrace: {line}\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader of a pipe has gone, or the stream was closed: the job goes on
                self._enabled = False

    def update(self, status: JobStatus) -> None:
        if self._live is not None:
            self._live.update(_rich_view(status), refresh=True)
        elif self._enabled and self._clock() - self._updated_at >= PLAIN_INTERVAL_SECONDS:
            self._updated_at = self._clock()
            self.write(plain_line(status))


def plain_line(status: JobStatus) -> str:
    return " · ".join([headline(status), *details(status)])


def headline(status: JobStatus) -> str:
    if status.paused_because is not None:
        return f"paused, {status.paused_because} · {_done(status)}"
    done = _done(status)
    return done if status.seconds_left is None else f"{done}, {duration(status.seconds_left)} left"


def _done(status: JobStatus) -> str:
    total = "?" if status.lines_total is None else f"{status.lines_total:,}"
    return f"{status.lines_done:,}/{total} lines"


def details(status: JobStatus) -> list[str]:
    """The parts of the line after the headline."""
    now, mean = status.rates_now, status.rates_mean
    parts = [
        f"in {now.prompt:,.0f} tok/s (mean {mean.prompt:,.0f})",
        f"out {now.completion:,.0f} tok/s (mean {mean.completion:,.0f})",
        f"cache hits {status.prefix_hit_share:.0%}",
        f"running {status.sequences_running:,}, waiting {status.sequences_waiting:,}, KV {status.kv_use:.0%}",
    ]
    if text := workers.progress_text(status.workers):
        parts.append(text)
    if gpus := progress_text(status.gpus, status.gpus_missing):
        parts.append(gpus)
    if saved := savings(status):
        parts.append(f"saved {saved}")
    if status.errors:
        parts.append("errors " + ", ".join(f"{code} {count:,}" for code, count in sorted(status.errors.items())))
    if text := failures(status):
        parts.append(text)
    if status.limited_by is not None:
        parts.append(f"limited by {status.limited_by}: {status.limited_because}")
    return parts


def failures(status: JobStatus) -> str:
    """Failures that the job recovered from. Empty if there were none."""
    parts = [f"{cause} {count:,}" for cause, count in sorted(status.retries.items())]
    text = [f"retries {', '.join(parts)}"] if parts else []
    if status.engine_deaths:
        text.append("lost: " + ", ".join(f"{loss} {n:,}" for loss, n in sorted(status.engine_deaths.items())))
    if status.memory_rungs:
        text.append(f"out of memory {len(status.memory_rungs):,} times, now: {status.memory_rungs[-1]}")
    if status.suspects:
        text.append(f"searching {status.suspects:,} lines for one that kills the engine")
    return " · ".join(text)


def savings(status: JobStatus) -> str:
    """Tokens that were not computed, by reason. Empty if there were none."""
    saved = status.saved
    parts = []
    if saved.prefix_tokens:
        parts.append(f"{saved.prefix_tokens:,} tokens by prefixes")
    if saved.duplicate_lines:
        num_tokens = saved.duplicate_prompt_tokens + saved.duplicate_completion_tokens
        parts.append(f"{num_tokens:,} tokens by duplicates (lines: {saved.duplicate_lines:,})")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _rich_view(status: JobStatus) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(total=status.lines_total, completed=status.lines_done, width=30, pulse=status.lines_total is None)
    head = Table.grid(padding=(0, 1))
    head.add_row(Text("headrace", style="bold"), bar, Text(headline(status)), Text(duration(status.seconds), "dim"))
    parts = details(status)
    limit = [Text(f"  {parts.pop()}", style="yellow")] if status.limited_by is not None else []
    lines = [Text(f"  {' · '.join(parts[start : start + 4])}", style="dim") for start in range(0, len(parts), 4)]
    return Group(head, *lines, *limit)
