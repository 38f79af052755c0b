"""`ServerMetrics`: counts requests and measures their latencies for Prometheus.

The series are in `table.py`. Nothing of a prompt or an answer gets here: only lengths, times and reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import table
from headrace.monitor.conditions import Source
from headrace.monitor.engine_counts import EngineCounts
from headrace.monitor.gpu_gauges import GpuGauges
from headrace.monitor.history import Reading
from headrace.monitor.series import Series
from headrace.monitor.store import OTHER, Store, Values
from headrace.monitor.times import RequestTimes
from headrace.version import __version__

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REFUSED_STATUS = 503
ENGINE = "0"  # the label of the only engine
DEFAULT_MAX_LEN = 131_072  # for the bucket bounds of token counts, when no settings are given


class ServerMetrics:
    """Counting is for the event loop's thread; `observe` and `render` may be called from any.

    Nothing is called once a token: tokens and the time between them are counted by the engine (`SchedulerStats`).
    """

    def __init__(
        self,
        model_name: str,
        settings: Settings | None = None,
        registry: CollectorRegistry | None = None,
        *,
        memory_share: float | None = None,
        gpus: GpuMonitor | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`memory_share`: the gpu_memory_utilization in force; None: it does not decide the size of the cache."""
        max_len = DEFAULT_MAX_LEN if settings is None else settings.max_model_len
        self._store = Store(table.SERIES, {"model_name": model_name, "engine": ENGINE}, max_len)
        self._engine = EngineCounts(self._store, clock, None if settings is None else settings.max_num_seqs)
        self._gpus = None if gpus is None else GpuGauges(self._store, gpus)
        self._observing = Lock()
        self._observe = {
            series: self._store.histogram(series).observe for series in table.SERIES if series.kind == "histogram"
        }
        self._registry = CollectorRegistry() if registry is None else registry
        self._registry.register(self._store)
        if registry is None:
            ProcessCollector(registry=self._registry)
        self._start_at_zero()
        self._store.set(table.BUILD_INFO, 1.0, __version__)
        self.settings = {} if settings is None else _shown_settings(settings, memory_share)
        if settings is not None:
            self._tell_settings()

    # ---- counting

    def received(self, *, n: int, max_tokens: int | None) -> None:
        self._store.add(table.RECEIVED, 1.0)
        self._observe[table.ASKED_ANSWERS](n)
        if max_tokens is not None:
            self._observe[table.ASKED_LENGTHS](max_tokens)

    def refused(self, reason: str) -> None:
        self._store.add(table.REFUSED, 1.0, reason)

    def answered(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP response. `handler` is the route, never the path that the client sent."""
        self._store.add(table.ANSWERED, 1.0, handler, method, f"{status // 100}xx")
        if status >= 500 and status != REFUSED_STATUS and handler in table.GENERATING_HANDLERS:
            self._store.add(table.HTTP_ERRORS, 1.0, handler)

    def restarted(self) -> None:
        self._store.add(table.RESTARTS, 1.0)

    def oldest_wait(self, seconds: float) -> None:
        """Set the wait of the oldest request that has no first token yet."""
        self._store.set(table.OLDEST_WAIT, seconds)

    def queue_usage(self, share: float | None) -> None:
        """Set the share of the queue's places that are taken; None if the queue has no limit."""
        if share is None:
            self._store.clear(table.QUEUE_USE)
        else:
            self._store.set(table.QUEUE_USE, share)

    def batches(self, by_status: Mapping[str, int], *, num_answered: int, num_failed: int) -> None:
        """Set the number of batches in each state, and of the lines of those that have ended since the start."""
        for status, number in by_status.items():
            self._store.set(table.BATCHES, float(number), status)
        self._store.set(table.BATCH_LINES, float(num_answered), "answered")
        self._store.set(table.BATCH_LINES, float(num_failed), "failed")

    def loop_lag(self, seconds: float) -> None:
        """Record by how much a timer of the event loop was late."""
        self._observe[table.LOOP_LAG](seconds)

    def first_token(self, seconds: float) -> None:
        """Record the time from the arrival of a request to its first token."""
        self._observe[table.FIRST_TOKEN_SECONDS](seconds)

    def finished(self, times: RequestTimes, reason: str) -> None:
        self._store.add(table.FINISHED, 1.0, reason if reason in FINISH_REASONS else OTHER)
        observe = self._observe
        observe[table.END_TO_END_SECONDS](times.finished - times.arrived)
        observe[table.PROMPT_LENGTHS](times.num_prompt)
        observe[table.COMPUTED_LENGTHS](times.num_prompt - times.num_cached)
        observe[table.ANSWER_LENGTHS](times.num_generated)
        observe[table.LONGEST_ANSWERS](_longest(times))
        observe[table.REQUEST_PREEMPTIONS](times.num_preemptions)
        if times.queued_until is not None:
            observe[table.QUEUE_SECONDS](_since(times.arrived, times.queued_until))
        if times.first_token is not None:
            self._observe_tokens(times, times.first_token)

    def _observe_tokens(self, times: RequestTimes, first_token: float) -> None:
        observe, started, last_token = self._observe, times.queued_until, times.last_token
        if not times.first_token_is_counted:
            self.first_token(first_token - times.arrived)
        if started is not None:
            observe[table.PREFILL_SECONDS](_since(started, first_token))
        if last_token is None:
            return
        if started is not None:
            observe[table.INFERENCE_SECONDS](_since(started, last_token))
        seconds, num_later = _since(first_token, last_token), _longest(times) - 1
        observe[table.DECODE_SECONDS](seconds)
        if num_later > 0:
            observe[table.REQUEST_TOKEN_SECONDS](seconds / num_later)

    # ---- reading

    def observe(self, stats: EngineStats | None) -> None:
        """Take in the counters of the engine, before a scrape; None if no engine responds."""
        with self._observing:
            self._engine.take(stats)

    def copy(self) -> Values:
        """All values at this moment, by series name."""
        return self._store.copy()

    def bounds(self, series: Series) -> tuple[float, ...]:
        """The upper bounds of a histogram's buckets."""
        return self._store.bounds(series)

    def read(self, sources: Iterable[Source]) -> dict[Source, Reading]:
        """The current values of some series, for the server's own history."""
        return {source: self._store.read(source.series, source.where) for source in sources}

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The page and its content type: Prometheus' text, or OpenMetrics where the Accept header asks for it."""
        if self._gpus is not None:
            self._gpus.update()
        if not _asks_for_openmetrics(accept or ""):
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # Its default escaping makes `vllm_` of `vllm:`; our names need none.
        page = openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST

    # ---- set-up

    def _start_at_zero(self) -> None:
        """Export counters at zero from the start, so that their first increment shows in `rate()`."""
        for reason in FINISH_REASONS:
            self._store.add(table.FINISHED, 0.0, reason)
        for reason in ("queue_full", "queue_tokens"):
            self._store.add(table.REFUSED, 0.0, reason)
        for handler in table.GENERATING_HANDLERS:
            self._store.add(table.HTTP_ERRORS, 0.0, handler)
        self._store.add(table.RECEIVED, 0.0)
        self._store.add(table.RESTARTS, 0.0)

    def _tell_settings(self) -> None:
        for series in _INFO:
            self._store.set(series, 1.0, *(str(self.settings[label]) for label in series.labels))


def _asks_for_openmetrics(accept: str) -> bool:
    return any(kind.partition(";")[0].strip().lower() == "application/openmetrics-text" for kind in accept.split(","))


_FIELD_OF = {"num_gpu_blocks": "num_blocks", "cache_dtype": "kv_dtype"}
_INFO = (table.CACHE_INFO, table.CONFIG_INFO)


def _shown_settings(settings: Settings, memory_share: float | None) -> dict[str, Any]:
    """The settings in the labels of the info series."""
    names = [label for series in _INFO for label in series.labels if label != "gpu_memory_utilization"]
    found = {name: getattr(settings, _FIELD_OF.get(name, name)) for name in names}
    return found | {"gpu_memory_utilization": memory_share}


def _since(before: float, after: float) -> float:
    """Clamp to zero: clocks of two processes may differ slightly."""
    return after - before if after > before else 0.0


def _longest(times: RequestTimes) -> int:
    """Tokens of the longest answer of a request; the mean length if it was not counted."""
    if times.num_longest is not None:
        return times.num_longest
    return -(-times.num_generated // times.n)
