"""One line a minute in the log while the server has work: throughput, requests, refusals, cache, and what limits it.

    each second          see(state)                running, waiting, KV cache use
    each snapshot (10 s) take(values, diagnosis)   a line, if the last one is a minute old and something happened since

The first line after an idle time comes with the first snapshot that shows work. An idle server writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from headrace.doctor.diagnosis import MIN_TOKENS, Diagnosis
from headrace.doctor.evidence import Evidence
from headrace.monitor import table
from headrace.monitor.store import Values

LINE_S = 60.0  # at least between two lines
REPEAT_S = 600.0  # advice that is the same as before is written again after this time

Write = Callable[[str, Mapping[str, Any]], None]  # the line, and its figures by name

log = logging.getLogger("headrace.load")


def write_to_log(line: str, figures: Mapping[str, Any]) -> None:
    log.info("%s", line, extra=dict(figures))


class Load(Protocol):
    """What runs and waits on the engines."""

    @property
    def num_running(self) -> float: ...

    @property
    def num_waiting(self) -> float: ...

    @property
    def kv_use(self) -> float: ...


class _Counts(NamedTuple):
    """Counters at one moment."""

    num_received: float
    num_prompt_tokens: float
    num_output_tokens: float
    num_queried_tokens: float  # of the prefix cache
    num_hit_tokens: float
    refused: Mapping[str, float]  # by reason

    @classmethod
    def of(cls, values: Values) -> _Counts:
        def total(name: str) -> float:
            return sum(values.numbers[name].values())

        return cls(
            total(table.RECEIVED.name),
            total(table.PROMPT_TOKENS.name),
            total(table.GENERATED_TOKENS.name),
            total(table.PREFIX_QUERIES.name),
            total(table.PREFIX_HITS.name),
            {labels[0]: number for labels, number in values.numbers[table.REFUSED.name].items()},
        )

    def refused_since(self, before: _Counts) -> dict[str, int]:
        grown = {reason: int(number - before.refused.get(reason, 0.0)) for reason, number in self.refused.items()}
        return {reason: number for reason, number in sorted(grown.items()) if number}


class _Gauges:
    """Means and the highest value of what was seen since the last line."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._num_running = 0.0
        self._num_waiting = 0.0
        self._kv_use = 0.0

    def see(self, state: Load) -> None:
        self.num_seen += 1
        self._num_running += state.num_running
        self._num_waiting += state.num_waiting
        self._kv_use = max(self._kv_use, state.kv_use)

    @property
    def has_work(self) -> bool:
        return self._num_running + self._num_waiting > 0

    def figures(self) -> dict[str, float | None]:
        """None: no engine responded."""
        if not self.num_seen:
            return {"num_running": None, "num_waiting": None, "kv_cache_usage": None}
        return {
            "num_running": round(self._num_running / self.num_seen, 1),
            "num_waiting": round(self._num_waiting / self.num_seen, 1),
            "kv_cache_usage": round(self._kv_use, 4),
        }


class LoadLog:
    """Owns the figures since the last line. Called on the event loop only."""

    def __init__(self, write: Write = write_to_log) -> None:
        self._write = write
        self._since: float | None = None  # when the period began; None: before the first snapshot
        self._before: _Counts | None = None  # counters at that time
        self._last: _Counts | None = None  # those of the last snapshot
        self._gauges = _Gauges()
        self._is_running = False  # at the last `see`
        self._written_at: float | None = None
        self._advised_at = 0.0
        self._advice: tuple[str | None, ...] | None = None

    def see(self, state: Load | None) -> None:
        """Take in the state of the engine; None: no engine responds."""
        self._is_running = state is not None and state.num_running + state.num_waiting > 0
        if state is not None:
            self._gauges.see(state)

    def take(self, values: Values, diagnosis: Diagnosis | None, now: float) -> None:
        """Take in a snapshot of the counters. `diagnosis`: of the time before it, if there is one."""
        counts = _Counts.of(values)
        last, self._last = self._last, counts
        if self._before is None or self._since is None or last is None:
            self._start(counts, now)
            return
        if counts == self._before and not self._gauges.has_work:  # nothing happened: the period begins later
            self._start(counts, now)
            return
        if self._written_at is not None and now < self._written_at + LINE_S:
            return
        is_idle = counts == last and not self._is_running
        limit = None if is_idle or diagnosis is None else diagnosis
        self._write_line(self._figures(self._before, counts, now - self._since), limit, is_idle=is_idle, now=now)
        self._written_at = now
        self._start(counts, now)

    def _start(self, counts: _Counts, now: float) -> None:
        self._since, self._before, self._gauges = now, counts, _Gauges()

    def _figures(self, before: _Counts, after: _Counts, seconds: float) -> dict[str, Any]:
        num_queried = after.num_queried_tokens - before.num_queried_tokens
        num_hit = after.num_hit_tokens - before.num_hit_tokens
        refused = after.refused_since(before)
        return {
            "interval_s": round(seconds, 1),
            "prompt_tokens_per_s": round((after.num_prompt_tokens - before.num_prompt_tokens) / seconds, 1),
            "output_tokens_per_s": round((after.num_output_tokens - before.num_output_tokens) / seconds, 1),
            **self._gauges.figures(),
            "num_refused": sum(refused.values()),
            "refused": refused,
            "prefix_cache_hit_rate": round(num_hit / num_queried, 4) if num_queried else None,
        }

    def _write_line(self, figures: dict[str, Any], diagnosis: Diagnosis | None, *, is_idle: bool, now: float) -> None:
        limit = None if diagnosis is None or diagnosis.limit is None else diagnosis.limit.limit
        ending = "; idle now" if is_idle else self._limited_by(diagnosis, now)
        self._write(_line(figures) + ending, {**figures, "limited_by": limit, "is_idle": is_idle})

    def _limited_by(self, diagnosis: Diagnosis | None, now: float) -> str:
        """The bottleneck. The advice is added if it differs from the last one, and every ten minutes."""
        if diagnosis is None or _is_idle(diagnosis.evidence) or not (diagnosis.limit or diagnosis.problems):
            return ""
        advice = _advice(diagnosis)
        is_new = advice != self._advice or now >= self._advised_at + REPEAT_S
        if is_new:
            self._advice, self._advised_at = advice, now
            headline = diagnosis.headline
            return f"; {headline[0].lower()}{headline[1:]}"
        limit = diagnosis.limit
        return f"; limited by {limit.limit}" if limit is not None else f"; {diagnosis.problems[0].title}"


def _line(figures: Mapping[str, Any]) -> str:
    hit_rate, running = figures["prefix_cache_hit_rate"], figures["num_running"]
    parts = [
        f"prompt throughput {figures['prompt_tokens_per_s']:.1f} tokens/s",
        f"generation throughput {figures['output_tokens_per_s']:.1f} tokens/s",
        *([] if running is None else [f"running {running:g} reqs", f"waiting {figures['num_waiting']:g} reqs"]),
        _refusals(figures["num_refused"], figures["refused"]),
        "no engine responds" if running is None else f"KV cache usage {figures['kv_cache_usage']:.1%}",
        *([] if hit_rate is None else [f"prefix cache hit rate {hit_rate:.1%}"]),
    ]
    return f"last {figures['interval_s']:.0f} s: {', '.join(parts)}"


def _refusals(num_refused: int, by_reason: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{number} {reason}" for reason, number in by_reason.items())
    return f"refused {num_refused} reqs" + (f" ({reasons})" if reasons else "")


def _is_idle(evidence: Evidence) -> bool:
    """Too few tokens to judge, and not because running sequences are stuck."""
    num_tokens = (evidence.output_tokens or 0.0) + (evidence.prompt_tokens or 0.0)
    return num_tokens < MIN_TOKENS and (evidence.num_running or 0.0) < 1


def _advice(diagnosis: Diagnosis) -> tuple[str | None, ...]:
    """What a line says, without numbers, which differ each time."""
    limit = None if diagnosis.limit is None else diagnosis.limit.rule
    return limit, next((finding.rule for finding in diagnosis.problems), None)
