"""Evaluates alerts inside the server, from its own history, with the states of Prometheus and `unknown`.

              condition holds             for `for_s`
ok, unknown ──────────────────▶ pending ──────────────▶ firing
    ▲                              │                       │
    └──────────────────────────────┴───────────────────────┘  it does not hold, or cannot be judged
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import eq, gt, lt
from typing import Literal

from headrace.monitor.alerts import Alert
from headrace.monitor.conditions import (
    Baseline,
    Condition,
    Increase,
    Level,
    Missing,
    Multiple,
    Quantile,
    Rate,
    Share,
    Value,
)
from headrace.monitor.history import History
from headrace.monitor.wording import duration_words, shown, threshold_words

State = Literal["ok", "pending", "firing", "unknown"]

_COMPARE = {">": gt, "<": lt, "==": eq}


@dataclass(frozen=True, slots=True)
class Measured:
    """A value; None with the reason why there is none."""

    value: float | None
    note: str = ""
    is_idle: bool = False  # there is none because nothing happened, which is no reason to worry


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a condition holds; None: it cannot be judged, as `note` explains."""

    holds: bool | None
    value: float | None
    threshold: float | None
    note: str = ""


def measure(value: Value, history: History) -> Measured:
    """A value over the newest samples."""
    match value:
        case Level(source):
            level = history.latest(source)
            return Measured(level, "" if level is not None else f"{source.series.name} has no value now")
        case Missing(source):
            if not len(history):
                return Measured(None, "there are no samples yet")
            return Measured(1.0 if history.latest(source) is None else 0.0)
        case Rate(source, window_s) | Increase(source, window_s):
            grown = history.growth(source, window_s)
            if grown is None:
                return Measured(None, "there are no two samples yet")
            return Measured(grown.total / grown.seconds if isinstance(value, Rate) else grown.total)
        case Quantile(source, quantile, window_s):
            if history.growth(source, window_s) is None:
                return Measured(None, "there are no two samples yet")
            found = history.quantile(source, quantile, window_s)
            return Measured(found, *_idle(window_s)) if found is None else Measured(found)
        case Share(part, whole):
            return _share(measure(part, history), measure(whole, history), whole.window_s)


def _share(part: Measured, whole: Measured, window_s: int) -> Measured:
    if part.value is None or whole.value is None:
        return part if part.value is None else whole
    return Measured(part.value / whole.value) if whole.value else Measured(None, *_idle(window_s))


def _idle(window_s: int) -> tuple[str, bool]:
    return f"there were no requests in the last {duration_words(window_s)}", True


def measure_baseline(baseline: Baseline, history: History) -> Measured:
    """The usual value of a quantile; none before enough requests."""
    grown = history.growth(baseline.requests, baseline.span_s, ago_s=baseline.ago_s)
    num_requests = 0 if grown is None else round(grown.total)
    if num_requests < baseline.min_requests:
        return Measured(
            None,
            f"the baseline needs {baseline.min_requests} requests in the hour up to {duration_words(baseline.ago_s)} "
            f"ago, and had {num_requests}",
        )
    of = baseline.of
    median = history.median_quantile(
        of.source, of.quantile, of.window_s, span_s=baseline.span_s, step_s=baseline.step_s, ago_s=baseline.ago_s
    )
    return Measured(median, "" if median is not None else "the baseline has no window with requests")


def judge(condition: Condition, history: History) -> Judgement:
    """Compare the value with its threshold, and check the further conditions."""
    threshold = _threshold(condition, history)
    measured = measure(condition.value, history)
    if threshold.value is None or measured.value is None:
        holds = False if measured.is_idle and threshold.value is not None else None
        return Judgement(holds, measured.value, threshold.value, threshold.note or measured.note)
    holds = bool(_COMPARE[condition.operator](measured.value, threshold.value))
    for other in condition.also:
        further = judge(other, history)
        if further.holds is None:
            return Judgement(None, measured.value, threshold.value, further.note)
        holds = holds and further.holds
    return Judgement(holds, measured.value, threshold.value)


def _threshold(condition: Condition, history: History) -> Measured:
    limit = condition.threshold
    if not isinstance(limit, Multiple):
        return Measured(limit)
    usual = measure_baseline(limit.baseline, history)
    return usual if usual.value is None else Measured(limit.factor * usual.value)


@dataclass(frozen=True, slots=True)
class AlertStatus:
    """An alert and its state. `since` is when the state began, `active_since` when the condition began to hold; both
    are times of the wall clock."""

    alert: Alert
    state: State
    since: float
    judgement: Judgement
    active_since: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """An alert that started or stopped firing."""

    status: AlertStatus
    seconds: float = 0.0  # for how long it fired, if it stopped

    def __str__(self) -> str:
        alert, judgement = self.status.alert, self.status.judgement
        value = "no value" if judgement.value is None else shown(judgement.value, alert.unit)
        if self.status.state != "firing":
            return f"alert resolved: {alert.name} after {self.seconds:,.0f} s; {alert.measure}: {value}"
        return (
            f"alert firing: {alert.name} ({alert.severity}); {alert.measure}: {value}, "
            f"threshold: {threshold_words(alert)}. {alert.meaning} {alert.advice}"
        )


class AlertStates:
    """Owns the state of each alert. `evaluate` is called after each sample."""

    def __init__(self, alerts: Iterable[Alert], history: History) -> None:
        self._history = history
        self._alerts = tuple(alerts)
        self._statuses: dict[str, AlertStatus] = {}
        self._held_since: dict[str, float] = {}  # of a monotonic clock: when the condition began to hold
        self._fired_at: dict[str, float] = {}

    @property
    def statuses(self) -> list[AlertStatus]:
        """All alerts, in the order of their list; empty before the first evaluation."""
        return list(self._statuses.values())

    def evaluate(self, *, now: float, wall_time: float) -> list[Change]:
        """Judge every alert. Returns those that started or stopped firing."""
        changes = []
        for alert in self._alerts:
            before = self._statuses.get(alert.name)
            after = self._judge(alert, before, now, wall_time)
            self._statuses[alert.name] = after
            was_firing, fires = before is not None and before.state == "firing", after.state == "firing"
            if fires and not was_firing:
                self._fired_at[alert.name] = now
                changes.append(Change(after))
            elif was_firing and not fires:
                changes.append(Change(after, now - self._fired_at.pop(alert.name)))
        return changes

    def _judge(self, alert: Alert, before: AlertStatus | None, now: float, wall_time: float) -> AlertStatus:
        judgement = judge(alert.condition, self._history)
        active_since = None
        if judgement.holds:
            held_since = self._held_since.setdefault(alert.name, now)
            active_since = wall_time - (now - held_since)
            state: State = "firing" if now - held_since >= alert.for_s else "pending"
        else:
            self._held_since.pop(alert.name, None)
            state = "unknown" if judgement.holds is None else "ok"
        since = wall_time if before is None or before.state != state else before.since
        return AlertStatus(alert, state, since, judgement, active_since)
