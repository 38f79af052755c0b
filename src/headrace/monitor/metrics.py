"""`ServerMetrics`: counts requests and measures their latencies for Prometheus.

The series are in `table.py`. Nothing of a prompt or an answer gets here: only lengths, times and reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

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
from headrace.monitor.stores import Stores
from headrace.monitor.times import RequestTimes
from headrace.version import __version__

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REFUSED_STATUS = 503
TARGET_USE = 0.8  # of the slots: what a replica should have to do
DEFAULT_MAX_LEN = 131_072  # for the bucket bounds of token counts, when no settings are given


class EngineLoad(NamedTuple):
    """What runs and waits on all engines, and the cache use of the fullest."""

    num_running: float
    num_waiting: float
    kv_use: float


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
        others: Sequence[Settings] = (),
        memory_share: float | None = None,
        gpus: GpuMonitor | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`others`: the settings of further engines. `memory_share`: the gpu_memory_utilization in force; None: it does
        not decide the size of the cache."""
        max_len = DEFAULT_MAX_LEN if settings is None else settings.max_model_len
        self._stores = Stores(table.SERIES, model_name, num_engines=1 + len(others), max_model_len=max_len)
        self._store = self._stores.server
        self._engines = [EngineCounts(store, clock) for store in self._stores.engines]
        self._num_slots = None if settings is None else sum(each.max_num_seqs for each in (settings, *others))
        self._gpus = None if gpus is None else GpuGauges(self._store, gpus)
        self._observing = Lock()
        self._observe = [
            {
                series: self._stores.of(series)[-1 if series.scope == "server" else number].histogram(series).observe
                for series in table.SERIES
                if series.kind == "histogram"
            }
            for number in range(1 + len(others))
        ]
        self._registry = CollectorRegistry() if registry is None else registry
        self._registry.register(self._stores)
        if registry is None:
            ProcessCollector(registry=self._registry)
        self._start_at_zero()
        self._store.set(table.BUILD_INFO, 1.0, __version__)
        self.settings = {} if settings is None else _shown_settings(settings, memory_share)
        if settings is not None:
            for store, each in zip(self._stores.engines, (settings, *others), strict=True):
                _tell_settings(store, _shown_settings(each, memory_share))

    # ---- counting

    def received(self, *, n: int, max_tokens: int | None) -> None:
        self._store.add(table.RECEIVED, 1.0)
        self._observe[0][table.ASKED_ANSWERS](n)
        if max_tokens is not None:
            self._observe[0][table.ASKED_LENGTHS](max_tokens)

    def refused(self, reason: str) -> None:
        self._store.add(table.REFUSED, 1.0, reason)

    def answered(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP response. `handler` is the route, never the path that the client sent."""
        self._store.add(table.ANSWERED, 1.0, handler, method, f"{status // 100}xx")
        if status >= 500 and status != REFUSED_STATUS and handler in table.GENERATING_HANDLERS:
            self._store.add(table.HTTP_ERRORS, 1.0, handler)

    def restarted(self, *, engine: int = 0) -> None:
        self._stores.engines[engine].add(table.RESTARTS, 1.0)

    def sleeping(self, level: int) -> None:
        """The engines sleep at this level from now on; 0: they are awake."""
        for engine in self._engines:
            engine.sleep_level = level

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
        self._observe[0][table.LOOP_LAG](seconds)

    def first_token(self, seconds: float, *, engine: int = 0) -> None:
        """Record the time from the arrival of a request to its first token."""
        self._observe[engine][table.FIRST_TOKEN_SECONDS](seconds)

    def finished(self, times: RequestTimes, reason: str) -> None:
        store, observe = self._stores.engines[times.engine], self._observe[times.engine]
        store.add(table.FINISHED, 1.0, reason if reason in FINISH_REASONS else OTHER)
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
        observe, started, last_token = self._observe[times.engine], times.queued_until, times.last_token
        if not times.first_token_is_counted:
            self.first_token(first_token - times.arrived, engine=times.engine)
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

    def observe(self, *each: EngineStats | None) -> None:
        """Take in the counters of each engine, before a scrape; None if it does not respond."""
        with self._observing:
            for engine, stats in zip(self._engines, each, strict=True):
                engine.take(stats)
            self._set_replicas_needed([stats for stats in each if stats is not None])

    def _set_replicas_needed(self, responding: Sequence[EngineStats]) -> None:
        if self._num_slots is None or not responding:
            self._store.clear(table.REPLICAS_NEEDED)
            return
        num_sequences = sum(stats.scheduler.num_running + stats.scheduler.num_waiting for stats in responding)
        self._store.set(table.REPLICAS_NEEDED, num_sequences / (TARGET_USE * self._num_slots))

    @property
    def load(self) -> EngineLoad:
        """The gauges of all engines that respond, as of the last `observe`."""
        values = (self._stores.read(series) for series in (table.RUNNING, table.WAITING, table.KV_USE))
        return EngineLoad(*(value if isinstance(value, (int, float)) else 0.0 for value in values))

    def copy(self) -> Values:
        """All values at this moment, by series name."""
        return self._stores.copy()

    def bounds(self, series: Series) -> tuple[float, ...]:
        """The upper bounds of a histogram's buckets."""
        return self._stores.bounds(series)

    def read(self, sources: Iterable[Source]) -> dict[Source, Reading]:
        """The current values of some series, for the server's own history."""
        return {source: self._stores.read(source.series, source.where) for source in sources}

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
        for store in self._stores.engines:
            for reason in FINISH_REASONS:
                store.add(table.FINISHED, 0.0, reason)
            store.add(table.RESTARTS, 0.0)
        for reason in ("queue_full", "queue_tokens"):
            self._store.add(table.REFUSED, 0.0, reason)
        for handler in table.GENERATING_HANDLERS:
            self._store.add(table.HTTP_ERRORS, 0.0, handler)
        self._store.add(table.RECEIVED, 0.0)


def _tell_settings(store: Store, settings: Mapping[str, Any]) -> None:
    for series in _INFO:
        store.set(series, 1.0, *(str(settings[label]) for label in series.labels))


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
