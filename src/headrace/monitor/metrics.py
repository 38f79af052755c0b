"""`ServerMetrics`: what a server counts and how long things took, for Prometheus.

The series are in `table.py`. Nothing of a prompt or an answer gets here: only lengths, times and reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from threading import Lock
from time import monotonic

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.monitor import table
from headrace.monitor.engine_counts import EngineCounts
from headrace.monitor.series import Series
from headrace.monitor.store import OTHER, Store
from headrace.monitor.times import RequestTimes
from headrace.version import __version__

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
ENGINE = "0"  # the label of the only engine
DEFAULT_MAX_LEN = 131_072  # for the bounds of token counts, where no settings are given


class ServerMetrics:
    """Counting is for the event loop's thread; `observe` and `render` may be called from any."""

    def __init__(
        self,
        model_name: str,
        settings: Settings | None = None,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        max_len = DEFAULT_MAX_LEN if settings is None else settings.max_model_len
        self._store = Store(table.SERIES, {"model_name": model_name, "engine": ENGINE}, max_len)
        self._engine = EngineCounts(self._store, clock)
        self._observing = Lock()
        self._token_gaps = self._store.histogram(table.TOKEN_GAP_SECONDS)
        self._registry = CollectorRegistry() if registry is None else registry
        self._registry.register(self._store)
        if registry is None:
            ProcessCollector(registry=self._registry)
        self._start_at_zero()
        self._store.set(table.BUILD_INFO, 1.0, __version__)
        if settings is not None:
            self._tell_settings(settings)

    # ---- counting

    def received(self, *, n: int, max_tokens: int | None) -> None:
        self._store.add(table.RECEIVED, 1.0)
        self._observe(table.ASKED_ANSWERS, n)
        if max_tokens is not None:
            self._observe(table.ASKED_LENGTHS, max_tokens)

    def refused(self, reason: str) -> None:
        self._store.add(table.REFUSED, 1.0, reason)

    def answered(self, handler: str, method: str, status: int) -> None:
        """An HTTP answer. `handler` is the route, never the path as it was sent."""
        self._store.add(table.ANSWERED, 1.0, handler, method, f"{status // 100}xx")

    def restarted(self) -> None:
        self._store.add(table.RESTARTS, 1.0)

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after the request."""
        self._observe(table.FIRST_TOKEN_SECONDS, seconds)

    def tokens(self, num_new: int, gap_s: float | None) -> None:
        """New tokens of a sequence, so long after those before them; None: there were none before them."""
        if gap_s is None:
            return
        gaps = self._token_gaps
        if num_new == 1:  # once for each token of the server: `observe` without the call
            gaps.counts[bisect_left(gaps.bounds, gap_s)] += 1
            gaps.total += gap_s
        elif num_new > 1:
            gaps.observe(gap_s / num_new, num_new)

    def finished(self, times: RequestTimes, reason: str) -> None:
        self._store.add(table.FINISHED, 1.0, reason if reason in FINISH_REASONS else OTHER)
        self._observe(table.END_TO_END_SECONDS, times.finished - times.arrived)
        self._observe(table.PROMPT_LENGTHS, times.num_prompt)
        self._observe(table.COMPUTED_LENGTHS, times.num_prompt - times.num_cached)
        self._observe(table.ANSWER_LENGTHS, times.num_generated)
        self._observe(table.LONGEST_ANSWERS, _longest(times))
        self._observe(table.REQUEST_PREEMPTIONS, times.num_preemptions)
        self._observe_phases(times)

    def _observe_phases(self, times: RequestTimes) -> None:
        started, first, last = times.queued_until, times.first_token, times.last_token
        if started is not None:
            self._observe(table.QUEUE_SECONDS, started - times.arrived)
        if first is None:
            return
        if not times.first_token_is_counted:
            self.first_token(first - times.arrived)
        if started is not None:
            self._observe(table.PREFILL_SECONDS, first - started)
        if last is None:
            return
        if started is not None:
            self._observe(table.INFERENCE_SECONDS, last - started)
        self._observe(table.DECODE_SECONDS, last - first)
        num_later = _longest(times) - 1
        if num_later > 0:
            self._observe(table.REQUEST_TOKEN_SECONDS, (last - first) / num_later)

    # ---- scraping

    def observe(self, stats: EngineStats | None) -> None:
        """Take in the engine's own counts, before a scrape; None if no engine answers."""
        with self._observing:
            self._engine.take(stats)

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The page and its content type: Prometheus' text, or OpenMetrics where the Accept header asks for it."""
        if not _asks_for_openmetrics(accept or ""):
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # Its default escaping makes `vllm_` of `vllm:`; our names need none.
        page = openmetrics.generate_latest(self._registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST

    # ---- set-up

    def _observe(self, series: Series, value: float) -> None:
        self._store.histogram(series).observe(max(0.0, value))

    def _start_at_zero(self) -> None:
        """Counters that nothing has moved yet are shown too, so that the first move is a growth."""
        for reason in FINISH_REASONS:
            self._store.add(table.FINISHED, 0.0, reason)
        for reason in ("queue_full", "queue_tokens"):
            self._store.add(table.REFUSED, 0.0, reason)
        self._store.add(table.RECEIVED, 0.0)
        self._store.add(table.RESTARTS, 0.0)

    def _tell_settings(self, settings: Settings) -> None:
        for series in (table.CACHE_INFO, table.CONFIG_INFO):
            labels = [str(getattr(settings, _FIELD_OF.get(label, label))) for label in series.labels]
            self._store.set(series, 1.0, *labels)


def _asks_for_openmetrics(accept: str) -> bool:
    return any(kind.partition(";")[0].strip().lower() == "application/openmetrics-text" for kind in accept.split(","))


_FIELD_OF = {"num_gpu_blocks": "num_blocks", "cache_dtype": "kv_dtype"}


def _longest(times: RequestTimes) -> int:
    """Tokens of a request's longest answer; if nobody counted, as if all were as long."""
    if times.num_longest is not None:
        return times.num_longest
    return -(-times.num_generated // times.n)
