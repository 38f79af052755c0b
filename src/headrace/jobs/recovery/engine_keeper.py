"""A job's engine, and the next one when it has died."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from headrace import garbage
from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError
from headrace.histogram import HistogramCounts
from headrace.sched import SchedulerStats
from headrace.types import Request, SequenceEvent

Start = Callable[[EngineConfig, Deliver], Engine]

_STANDING = frozenset({"num_running", "num_waiting", "num_blocks", "num_blocks_held", "num_blocks_idle", "block_size"})


class EngineKeeper:
    """At most one engine lives at a time. Events of one that is gone reach nobody."""

    def __init__(self, start: Start, send: Deliver) -> None:
        self._start = start
        self._send = send
        self._engine: Engine | None = None
        self._mouth: _Mouth | None = None

    def start(self, config: EngineConfig) -> Engine:
        """An engine in place of the one before, of which nothing is left in memory; the caller must hold nothing of it
        either."""
        self.close()
        self._mouth = _Mouth(self._send)
        self._engine = self._start(config, self._mouth.deliver)
        return self._engine

    def close(self) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        assert self._mouth is not None
        engine.close()
        self._mouth.is_shut = True
        failure = engine.client.failure
        del engine
        if failure is not None:
            _release(failure)


class _Mouth:
    def __init__(self, send: Deliver) -> None:
        self._send = send
        self.is_shut = False

    def deliver(self, events: list[SequenceEvent]) -> None:
        if not self.is_shut:
            self._send(events)


class GoneClient:
    """In the place of a client whose engine is gone, so that nothing of it is held."""

    def __init__(self, failure: BaseException) -> None:
        self.failure: BaseException | None = failure
        self.stats = EngineStats(SchedulerStats(), 0.0, 0.0)

    def submit(self, request: Request) -> None:
        raise EngineDeadError(f"the engine has stopped: {self.failure}")

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def limit_running(self, num_seqs: int | None) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def close(self) -> None:
        pass


def _release(failure: BaseException) -> None:
    """What a dead engine holds: its exception knows the frames in which it was raised, and these the weights."""
    seen: BaseException | None = failure
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    garbage.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError:
            pass  # the device is gone: the start of the next engine will tell


def joined(before: EngineStats | None, now: EngineStats) -> EngineStats:
    """Counts of engines one after the other as those of one; how things stand is the last one's."""
    if before is None:
        return now
    return EngineStats(
        _joined_scheduler(before.scheduler, now.scheduler),
        before.host_seconds + now.host_seconds,
        before.wait_seconds + now.wait_seconds,
        before.steady_host_seconds + now.steady_host_seconds,
        before.num_steady_steps + now.num_steady_steps,
        _joined_counts(before.step_seconds, now.step_seconds),
        _joined_counts(before.step_host_seconds, now.step_host_seconds),
        now.started_at,
    )


def _joined_scheduler(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    changes: dict[str, Any] = {}
    for each in fields(SchedulerStats):
        old, new = getattr(before, each.name), getattr(now, each.name)
        if isinstance(new, HistogramCounts):
            changes[each.name] = _joined_counts(old, new)
        elif each.name == "max_blocks_held":
            changes[each.name] = max(old, new)
        elif each.name not in _STANDING:
            changes[each.name] = old + new
    return replace(now, **changes)


def _joined_counts(before: HistogramCounts, now: HistogramCounts) -> HistogramCounts:
    if not before.counts or not now.counts:
        return before if before.counts else now
    counts = tuple(old + new for old, new in zip(before.counts, now.counts, strict=True))
    return HistogramCounts(counts, before.total + now.total)
