"""Input series and the states that alerts must have at some times, for Prometheus and for the server's own evaluation.

Each alert has scenarios on both sides of its threshold. The expected states are written by hand. None is at the
second where a window begins: a window includes its first second in Prometheus 2, and not in Prometheus 3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from headrace.monitor import table
from headrace.monitor.alerts import ALERTS, Alert
from headrace.monitor.conditions import Condition, Source, lookback_s, sources_of
from headrace.monitor.history import History, Reading
from headrace.monitor.promql import Names, alias_of
from headrace.monitor.series import Series

STEP_S = 10  # between two samples, and between two evaluations
BY_NAME = {alert.name: alert for alert in ALERTS}

OverTime = Callable[[int], float]


@dataclass(frozen=True)
class Input:
    """One sample per step: of a gauge (None: absent), a counter, or the buckets of a histogram."""

    series: Series
    samples: list[float | None] | list[list[int]]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    name: str
    alert: str
    inputs: tuple[Input, ...]
    states: Mapping[int, str]  # second -> state
    values: Mapping[int, float] = field(default_factory=dict)  # second -> value that both must compute

    @property
    def num_steps(self) -> int:
        return max(len(each.samples) for each in self.inputs)


def steps(seconds: int) -> range:
    return range(0, seconds + 1, STEP_S)


def gauge(series: Series, value: Callable[[int], float | None], seconds: int = 1500) -> Input:
    return Input(series, [value(second) for second in steps(seconds)])


def counter(
    series: Series, per_second: OverTime, seconds: int = 1500, reset_at: int | None = None, **labels: str
) -> Input:
    """A counter that grows at a rate, and starts again from 0 at `reset_at`."""
    samples: list[float | None] = []
    value = 0.0
    for second in steps(seconds):
        value = 0.0 if second == reset_at else value + per_second(second) * STEP_S * (second > 0)
        samples.append(value)
    return Input(series, samples, labels)


def histogram(series: Series, per_step: int, mix: Callable[[int], Mapping[float, float]], seconds: int = 1500) -> Input:
    """A histogram with `per_step` observations a step, of which `mix` gives the values and their shares."""
    assert series.bounds is not None
    counts = [0] * (len(series.bounds) + 1)
    samples = []
    for second in steps(seconds):
        for value, share in mix(second).items():
            counts[bisect_left(series.bounds, value)] += round(per_step * share)
        samples.append(list(counts))
    return Input(series, samples)


def from_second(start: int, before: float, after: float) -> OverTime:
    return lambda second: before if second < start else after


def slow_from(start: int, usual: float, slow: float, share: float = 1.0) -> Callable[[int], Mapping[float, float]]:
    return lambda second: {usual: 1.0} if second < start else {usual: 1.0 - share, slow: share}


def _latency(
    alert: str, series: Series, *, usual: float, slow: float, slightly_slow: float, usual_p95: float, slow_p95: float
) -> list[Scenario]:
    """A latency that grows at 3,000 s, after 300 requests or 120."""
    is_request = series is table.END_TO_END_SECONDS

    def inputs(mix: Callable[[int], Mapping[float, float]], seconds: int, per_step: int = 1) -> tuple[Input, ...]:
        if is_request:
            return (histogram(series, per_step * 20, mix, seconds),)
        requests = histogram(table.END_TO_END_SECONDS, per_step, lambda second: {1.0: 1.0}, seconds)
        return histogram(series, 20, mix, seconds), requests

    few = histogram(
        table.END_TO_END_SECONDS, 1, lambda s: {(slow if s >= 3000 else usual): 1.0} if s % 30 == 0 else {}, 3600
    )
    return [
        Scenario(
            f"{alert}: far above its baseline, until the baseline has followed",
            alert,
            inputs(slow_from(3000, usual, slow), 7200),
            {2990: "ok", 3100: "pending", 3400: "firing", 4500: "firing", 7200: "ok"},
            {2900: usual_p95, 3600: slow_p95},
        ),
        Scenario(
            f"{alert}: slightly above its baseline",
            alert,
            inputs(slow_from(3000, usual, slightly_slow, share=0.1), 3600),
            {2990: "ok", 3300: "ok", 3600: "ok"},
        ),
        Scenario(
            f"{alert}: fewer than 200 requests",
            alert,
            (few,) if is_request else (histogram(series, 20, slow_from(3000, usual, slow), 3600), few),
            {2990: "unknown", 3400: "unknown", 3600: "unknown"},
        ),
    ]


def _finished(failing: float) -> tuple[Input, ...]:
    """Ten requests per second, of which a share fails."""
    return (
        counter(table.FINISHED, lambda s: 10 * failing, reason="error"),
        counter(table.FINISHED, lambda s: 10 * (1 - failing) - 1, reason="stop"),
        counter(table.FINISHED, lambda s: 1.0, reason="length"),
    )


def _answered(failing: float, refused: float = 0.0) -> tuple[Input, ...]:
    chat = {"handler": "/v1/chat/completions", "method": "POST"}
    return (
        counter(table.HTTP_ERRORS, lambda s: 10 * failing, handler=chat["handler"]),
        counter(table.ANSWERED, lambda s: 10 * (failing + refused), status="5xx", **chat),
        counter(table.ANSWERED, lambda s: 10 * (1 - failing - refused), status="2xx", **chat),
        counter(table.ANSWERED, lambda s: 100.0, status="2xx", handler="/health", method="GET"),
    )


def _gauge_pair(alert: str, series: Series, over: float, not_over: float, for_s: int) -> list[Scenario]:
    """A gauge that is over its threshold from 600 s on, but for a short time at 1,200 s; and one that is not."""

    def value(second: int) -> float:
        return over if second >= 600 and second != 1200 else not_over

    return [
        Scenario(
            f"{alert}: over",
            alert,
            (gauge(series, value),),
            {590: "ok", 600: "pending", 590 + for_s: "pending", 600 + for_s: "firing", 1200: "ok", 1210: "pending"},
            {700: over},
        ),
        Scenario(f"{alert}: not over", alert, (gauge(series, lambda s: not_over),), {600: "ok", 1500: "ok"}),
    ]


SCENARIOS = [
    Scenario(
        "EngineDown: down for five minutes",
        "EngineDown",
        (gauge(table.ENGINE_UP, lambda s: 0.0 if 600 <= s < 900 else 1.0),),
        {590: "ok", 600: "pending", 650: "pending", 660: "firing", 890: "firing", 900: "ok"},
    ),
    Scenario("EngineDown: up", "EngineDown", (gauge(table.ENGINE_UP, lambda s: 1.0),), {1500: "ok"}),
    Scenario(
        "MetricsMissing: absent",
        "MetricsMissing",
        (gauge(table.RUNNING, lambda s: 3.0 if s < 600 else None), gauge(table.ENGINE_UP, lambda s: 1.0)),
        {590: "ok", 600: "pending", 890: "pending", 900: "firing"},
    ),
    Scenario("MetricsMissing: zero", "MetricsMissing", (gauge(table.RUNNING, lambda s: 0.0),), {1500: "ok"}),
    Scenario(
        "EngineRestarted: once",
        "EngineRestarted",
        (counter(table.RESTARTS, lambda s: 0.1 if s == 600 else 0.0, 2000),),
        {590: "ok", 600: "firing", 1180: "firing", 1210: "ok"},
        {900: 1.0},
    ),
    Scenario(
        "EngineRestarted: the counter starts again from 0",
        "EngineRestarted",
        (counter(table.RESTARTS, lambda s: 0.3 if s == 10 else 0.0, reset_at=900),),
        {890: "ok", 900: "ok", 1000: "ok"},
    ),
    Scenario(
        "NoProgress: tokens stop while requests run",
        "NoProgress",
        (counter(table.GENERATED_TOKENS, from_second(610, 100.0, 0.0)), gauge(table.RUNNING, lambda s: 4.0)),
        {640: "ok", 660: "pending", 700: "pending", 720: "firing"},
    ),
    Scenario(
        "NoProgress: tokens stop because nothing runs",
        "NoProgress",
        (
            counter(table.GENERATED_TOKENS, from_second(610, 100.0, 0.0)),
            gauge(table.RUNNING, from_second(610, 4.0, 0.0)),
        ),
        {650: "ok", 720: "ok", 1500: "ok"},
    ),
    Scenario(
        "NoProgress: few tokens",
        "NoProgress",
        (counter(table.GENERATED_TOKENS, lambda s: 0.1), gauge(table.RUNNING, lambda s: 1.0)),
        {720: "ok", 1500: "ok"},
    ),
    *_gauge_pair("KvCacheNearlyFull", table.KV_USE, 0.901, 0.9, 300),
    *_gauge_pair("RequestsWaiting", table.WAITING, 101, 100, 300),
    *_gauge_pair("QueueNearlyFull", table.QUEUE_USE, 0.81, 0.8, 300),
    *_gauge_pair("OldestRequestWaiting", table.OLDEST_WAIT, 30.1, 30.0, 60),
    Scenario(
        "PreemptionsFrequent: over",
        "PreemptionsFrequent",
        (counter(table.PREEMPTIONS, from_second(610, 0.0, 1.2)),),
        {600: "ok", 840: "ok", 900: "pending", 1200: "firing"},
        {900: 1.2, 1200: 1.2},
    ),
    Scenario(
        "PreemptionsFrequent: over, and the counter starts again from 0",
        "PreemptionsFrequent",
        (counter(table.PREEMPTIONS, lambda s: 1.2, reset_at=1000),),
        {990: "firing", 1000: "firing", 1500: "firing"},
    ),
    Scenario(
        "PreemptionsFrequent: not over, and the counter starts again from 0",
        "PreemptionsFrequent",
        (counter(table.PREEMPTIONS, lambda s: 0.9, reset_at=1000),),
        {990: "ok", 1000: "ok", 1500: "ok"},
        {1500: 0.9},
    ),
    Scenario(
        "RequestsRefused: the queue is full",
        "RequestsRefused",
        (
            counter(table.REFUSED, from_second(610, 0.0, 0.1), reason="queue_full"),
            counter(table.REFUSED, lambda s: 0.0, reason="queue_tokens"),
        ),
        {600: "ok", 610: "pending", 900: "pending", 910: "firing"},
        {1200: 0.1},
    ),
    Scenario(
        "RequestsRefused: for other reasons",
        "RequestsRefused",
        (
            counter(table.REFUSED, lambda s: 5.0, reason="auth"),
            counter(table.REFUSED, lambda s: 1.0, reason="validation"),
            counter(table.REFUSED, lambda s: 0.0, reason="queue_full"),
        ),
        {910: "ok", 1500: "ok"},
    ),
    Scenario("RequestsFailing: 1.1 %", "RequestsFailing", _finished(0.011), {900: "firing"}, {900: 0.011}),
    Scenario("RequestsFailing: 0.9 %", "RequestsFailing", _finished(0.009), {900: "ok", 1500: "ok"}, {900: 0.009}),
    Scenario(
        "RequestsFailing: idle",
        "RequestsFailing",
        (counter(table.FINISHED, lambda s: 0.0, reason="error"), counter(table.FINISHED, lambda s: 0.0, reason="stop")),
        {900: "ok"},
    ),
    Scenario("HttpErrors: 1.1 %", "HttpErrors", _answered(0.011), {900: "firing"}, {900: 0.011}),
    Scenario("HttpErrors: 0.9 %", "HttpErrors", _answered(0.009), {900: "ok"}, {900: 0.009}),
    Scenario("HttpErrors: refusals are no errors", "HttpErrors", _answered(0.0, refused=0.5), {900: "ok", 1500: "ok"}),
    *_latency(
        "TimeToFirstTokenHigh",
        table.FIRST_TOKEN_SECONDS,
        usual=0.25,
        slow=1.0,
        slightly_slow=0.5,
        usual_p95=0.2425,
        slow_p95=0.9875,
    ),
    *_latency(
        "InterTokenLatencyHigh",
        table.TOKEN_GAP_SECONDS,
        usual=0.025,
        slow=0.1,
        slightly_slow=0.05,
        usual_p95=0.02425,
        slow_p95=0.09875,
    ),
    *_latency(
        "EndToEndLatencyHigh",
        table.END_TO_END_SECONDS,
        usual=2.0,
        slow=5.0,
        slightly_slow=2.5,
        usual_p95=1.975,
        slow_p95=4.875,
    ),
    Scenario(
        "EventLoopLagging: over",
        "EventLoopLagging",
        (histogram(table.LOOP_LAG, 10, slow_from(610, 0.001, 0.2)),),
        {600: "ok", 950: "firing", 1500: "firing"},
        {950: 0.195},
    ),
    Scenario(
        "EventLoopLagging: not over",
        "EventLoopLagging",
        (histogram(table.LOOP_LAG, 10, slow_from(610, 0.001, 0.1)),),
        {600: "ok", 950: "ok", 1500: "ok"},
        {950: 0.09875},
    ),
]


# ---- for the server's own evaluation


def history_of(condition: Condition) -> History:
    return History(sources_of(condition), span_s=lookback_s(condition), interval_s=STEP_S)


def readings_at(scenario: Scenario, step: int, sources: tuple[Source, ...]) -> dict[Source, Reading]:
    return {source: _reading(scenario, step, source) for source in sources}


def _reading(scenario: Scenario, step: int, source: Source) -> Reading:
    found = [each for each in scenario.inputs if each.series is source.series and _accepts(source, each.labels)]
    if source.series.kind == "histogram":
        (each,) = found
        return each.samples[step]  # type: ignore[return-value]
    values = [each.samples[step] for each in found if each.samples[step] is not None]
    return sum(values) if values or source.series.kind == "counter" else None  # type: ignore[arg-type]


def _accepts(source: Source, labels: Mapping[str, str]) -> bool:
    return all(labels[label] in values for label, values in source.where)


# ---- for promtool


def promtool_series(scenario: Scenario, names: Names) -> list[dict[str, str]]:
    """The inputs in the format of `promtool test rules`."""
    return [one for each in scenario.inputs for one in _series(each, names)]


def _series(each: Input, names: Names) -> list[dict[str, str]]:
    alias = alias_of(each.series, names)
    if alias is None:
        return []
    base = {"job": "j", "instance": "i", "model_name": "m", "engine": "0"}
    own = {alias.labels.get(key, key): (alias.values or {}).get(value, value) for key, value in each.labels.items()}
    labels = base | own
    if each.series.kind != "histogram":
        suffix = "_total" if each.series.kind == "counter" else ""
        return [_one(alias.name + suffix, labels, each.samples)]  # type: ignore[arg-type]
    assert each.series.bounds is not None
    bounds = [f"{bound:g}" for bound in each.series.bounds] + ["+Inf"]
    up_to = [list(accumulate(counts)) for counts in each.samples]  # type: ignore[arg-type]
    shown = [
        _one(f"{alias.name}_bucket", labels | {"le": bound}, [sample[position] for sample in up_to])
        for position, bound in enumerate(bounds)
    ]
    return [*shown, _one(f"{alias.name}_count", labels, [sample[-1] for sample in up_to])]


def _one(name: str, labels: Mapping[str, str], samples: list[float | None]) -> dict[str, str]:
    selected = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    values = []
    for before, sample in zip([None, *samples], samples, strict=False):
        values.append("_" if before is sample is None else "stale" if sample is None else f"{sample:.10g}")
    return {"series": f"{name}{{{selected}}}", "values": " ".join(values)}


def alert_of(scenario: Scenario) -> Alert:
    return BY_NAME[scenario.alert]
