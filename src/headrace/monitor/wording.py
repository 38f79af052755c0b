"""Says conditions and values in words, for docs, messages and annotations."""

from __future__ import annotations

from headrace.monitor.alerts import Alert, Unit
from headrace.monitor.conditions import (
    Increase,
    Level,
    Missing,
    Multiple,
    Quantile,
    Rate,
    Share,
    Source,
    Value,
)


def condition_words(alert: Alert) -> str:
    """The condition in words, in Markdown."""
    condition = alert.condition
    if isinstance(condition.value, Missing):
        return f"{_words(condition.value)} is absent"
    text = f"{_words(condition.value)} {condition.operator} {threshold_words(alert)}"
    for other in condition.also:
        assert not isinstance(other.threshold, Multiple)
        text += f" while {_words(other.value)} {other.operator} {other.threshold:g}"
    return text


def threshold_words(alert: Alert) -> str:
    threshold = alert.condition.threshold
    if not isinstance(threshold, Multiple):
        return shown(threshold, alert.unit)
    span = duration_words(threshold.baseline.span_s)
    return f"{threshold.factor:g} x its median over {span} ({threshold.baseline.min_requests} requests or more)"


def summary_words(alert: Alert, value: str) -> str:
    """What an active alert says in one line: what is measured, its value in words, and the threshold."""
    if alert.unit == "state":
        return alert.measure
    return f"{alert.measure}: {value}; threshold: {threshold_words(alert)}"


def duration_words(seconds: float) -> str:
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds // unit_s:g} {name}"
    return f"{seconds:g} s"


def _words(value: Value) -> str:
    match value:
        case Level(source) | Missing(source):
            return _source_words(source)
        case Rate(source, window_s):
            return f"rate of {_source_words(source)} over {duration_words(window_s)}"
        case Increase(source, window_s):
            return f"increase of {_source_words(source)} in {duration_words(window_s)}"
        case Quantile(source, quantile, window_s):
            return f"p{100 * quantile:g} of {_source_words(source)} over {duration_words(window_s)}"
        case Share(part, whole):
            return f"{_words(part)} / {_words(whole)}"


def _source_words(source: Source) -> str:
    suffix = "_total" if source.series.kind == "counter" else ""
    where = "".join(f" with {label} {', '.join(f'`{v}`' for v in values)}" for label, values in source.where)
    return f"`{source.series.name}{suffix}`{where}"


def shown(value: float, unit: Unit) -> str:
    """A value with its unit, for people."""
    match unit:
        case "share":
            return f"{100 * value:.3g} %"
        case "seconds":
            return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
        case "per_second":
            return f"{value:.3g}/s"
        case _:
            return f"{value:,.6g}"
