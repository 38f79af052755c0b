"""The server watches itself: it samples its own metrics, keeps their history and evaluates the alerts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, time
from typing import Protocol

from headrace.monitor import table
from headrace.monitor.alerts import ALERTS, FAILED, HTTP_ERRORS, OVERLOAD
from headrace.monitor.conditions import Source, lookback_s, sources_of
from headrace.monitor.evaluation import AlertStates
from headrace.monitor.history import INTERVAL_S, SPAN_S, Column, History, Reading

# What a dashboard shows, by the names of `History.table`.
COLUMNS = {
    "prompt_tokens_per_s": Column(Source(table.PROMPT_TOKENS)),
    "generation_tokens_per_s": Column(Source(table.GENERATED_TOKENS)),
    "num_running": Column(Source(table.RUNNING)),
    "num_waiting": Column(Source(table.WAITING)),
    "finished_per_s": Column(Source(table.FINISHED)),
    "refused_per_s": Column(OVERLOAD),
    "kv_use": Column(Source(table.KV_USE)),
    "prefix_hit_share": Column(Source(table.PREFIX_HITS), per=Source(table.PREFIX_QUERIES)),
    "ttft_p50_s": Column(Source(table.FIRST_TOKEN_SECONDS), 0.5),
    "ttft_p95_s": Column(Source(table.FIRST_TOKEN_SECONDS), 0.95),
    "itl_p50_s": Column(Source(table.TOKEN_GAP_SECONDS), 0.5),
    "itl_p95_s": Column(Source(table.TOKEN_GAP_SECONDS), 0.95),
    "e2e_p50_s": Column(Source(table.END_TO_END_SECONDS), 0.5),
    "e2e_p95_s": Column(Source(table.END_TO_END_SECONDS), 0.95),
    "errors_per_s": Column(FAILED),
    "http_errors_per_s": Column(HTTP_ERRORS),
    "preemptions_per_s": Column(Source(table.PREEMPTIONS)),
}

# What it shows of this moment: the same, and gauges that need no history.
LIVE_COLUMNS = COLUMNS | {
    "prompt_tokens_per_s": Column(Source(table.PROMPT_RATE)),
    "generation_tokens_per_s": Column(Source(table.GENERATION_RATE)),
    "queue_use": Column(Source(table.QUEUE_USE)),
    "oldest_wait_s": Column(Source(table.OLDEST_WAIT)),
}


class ReadableMetrics(Protocol):
    def read(self, sources: Iterable[Source]) -> dict[Source, Reading]: ...


class SelfMonitor:
    """Owns the history and the states of alerts. Runs on the event loop; a sample takes less than a millisecond."""

    def __init__(
        self,
        metrics: ReadableMetrics,
        refresh: Callable[[], object],
        *,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
        wall_clock: Callable[[], float] = time,
    ) -> None:
        """`refresh` brings the metrics up to date before they are read."""
        self._metrics = metrics
        self._refresh = refresh
        self._print_line = print_line
        self._clock = clock
        self._wall_clock = wall_clock
        sources = [source for alert in ALERTS for source in sources_of(alert.condition)]
        sources += [source for column in COLUMNS.values() for source in column.sources]
        self.history = History(sources, span_s=max(SPAN_S, *(lookback_s(alert.condition) for alert in ALERTS)))
        self.alerts = AlertStates(ALERTS, self.history)

    def sample(self) -> None:
        """Take one sample, evaluate the alerts, and print those that started or stopped firing."""
        self._refresh()
        now, wall_time = self._clock(), self._wall_clock()
        self.history.record(self._metrics.read(self.history.sources), now=now, wall_time=wall_time)
        for change in self.alerts.evaluate(now=now, wall_time=wall_time):
            self._print_line(str(change))

    def now(self) -> dict[str, float | None]:
        """The figures of this moment, by the names of `LIVE_COLUMNS`."""
        self._refresh()
        readings = self._metrics.read({source for column in LIVE_COLUMNS.values() for source in column.sources})
        return self.history.now(LIVE_COLUMNS, readings, now=self._clock())

    @contextlib.contextmanager
    def running(self, interval_s: float = INTERVAL_S) -> Iterator[asyncio.Task[None]]:
        """Sample periodically in a task of the running event loop."""
        task = asyncio.create_task(self._run(interval_s), name="self-monitor")
        task.add_done_callback(self._report_failure)
        try:
            yield task
        finally:
            task.cancel()

    async def _run(self, interval_s: float) -> None:
        while True:
            self.sample()
            await asyncio.sleep(interval_s)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._print_line(f"the server no longer watches itself: {type(error).__name__}: {error}")
