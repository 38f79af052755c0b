"""Writes alerts as Prometheus rules, under Headrace's or vLLM's names of the series.

Aggregations remove only a series' own labels: `job`, `instance`, `model_name` and `engine` stay, so that each engine of
each server has alerts of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from headrace.monitor.alerts import Alert, Unit
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
    Source,
    Value,
    sources_of,
)
from headrace.monitor.series import Alias, Series
from headrace.monitor.wording import summary_words

Names = Literal["headrace", "vllm"]

PREFIXES: dict[Names, str] = {"headrace": "Headrace", "vllm": "Vllm"}  # of alert names
_FILTERS: dict[Unit, str] = {"share": "humanizePercentage", "seconds": "humanizeDuration"}


def alias_of(series: Series, names: Names) -> Alias | None:
    """The name under which rules select the series; None if vLLM does not have it."""
    if names == "headrace":
        return series.as_alias
    return next((a for a in series.aliases if a.name.startswith("vllm:") and a.constant is None), None)


def exists(alert: Alert, names: Names) -> bool:
    """Whether all of the alert's series have such names."""
    return all(alias_of(source.series, names) is not None for source in sources_of(alert.condition))


def expression(condition: Condition, names: Names = "headrace") -> str:
    """The condition in PromQL: it has a result while it holds."""
    parts = [f"{value_expression(condition.value, names)} {condition.operator} {_threshold(condition, names)}"]
    if isinstance(condition.threshold, Multiple):
        parts.append(_enough_requests(condition.threshold.baseline, names))
    parts += [expression(other, names) for other in condition.also]
    return "\nand ".join(parts)


def value_expression(value: Value, names: Names = "headrace") -> str:
    """The value that is compared, in PromQL."""
    match value:
        case Level(source):
            return _summed(source, _selector(source, names), names)
        case Rate(source, window_s):
            return _summed(source, f"rate({_selector(source, names)}[{_duration(window_s)}])", names)
        case Increase(source, window_s):
            return _summed(source, f"increase({_selector(source, names)}[{_duration(window_s)}])", names)
        case Quantile(source, quantile, window_s):
            rate = f"rate({_selector(source, names, '_bucket')}[{_duration(window_s)}])"
            return f"histogram_quantile({quantile:g}, {_summed(source, rate, names)})"
        case Share(part, whole):
            return f"{value_expression(part, names)}\n/ {value_expression(whole, names)}"
        case Missing(source):
            return f"absent({_selector(source, names)})"


def baseline_expression(baseline: Baseline, names: Names = "headrace") -> str:
    """The usual value. A window without observations is NaN, which `>= 0` removes."""
    windows = f"({value_expression(baseline.of, names)} >= 0)"
    subquery = f"{windows}[{_duration(baseline.span_s)}:{_duration(baseline.step_s)}]"
    return f"quantile_over_time(0.5, {subquery} offset {_duration(baseline.ago_s)})"


def rule(alert: Alert, names: Names, labels: Mapping[str, str]) -> dict[str, Any]:
    """One alerting rule."""
    return {
        "alert": PREFIXES[names] + alert.name,
        "expr": expression(alert.condition, names),
        **({"for": _duration(alert.for_s)} if alert.for_s else {}),
        "labels": {"severity": alert.severity, **labels},
        "annotations": {
            "summary": _summary(alert),
            "description": alert.meaning,
            "advice": alert.advice,
        },
    }


def _summary(alert: Alert) -> str:
    return summary_words(alert, f"{{{{ $value | {_FILTERS.get(alert.unit, 'humanize')} }}}}")


def rule_file(alerts: Iterable[Alert], names: Names, labels: Mapping[str, str]) -> dict[str, Any]:
    """The content of a rule file: one group with each alert whose series have such names."""
    rules = [rule(alert, names, labels) for alert in alerts if exists(alert, names)]
    return {"groups": [{"name": names, "rules": rules}]}


def as_yaml(rules: Mapping[str, Any]) -> str:
    """A rule file in YAML. Strings are quoted as in JSON, which YAML includes."""
    lines = ["groups:"]
    for group in rules["groups"]:
        lines += [f"  - name: {_quoted(group['name'])}", "    rules:"]
        for one in group["rules"]:
            lines += _yaml_rule(one)
    return "\n".join(lines) + "\n"


def _yaml_rule(one: Mapping[str, Any]) -> list[str]:
    lines = [f"      - alert: {one['alert']}", "        expr: |-"]
    lines += [f"          {line}" for line in one["expr"].splitlines()]
    if "for" in one:
        lines.append(f"        for: {one['for']}")
    for part in ("labels", "annotations"):
        lines.append(f"        {part}:")
        lines += [f"          {key}: {_quoted(value)}" for key, value in one[part].items()]
    return lines


def _threshold(condition: Condition, names: Names) -> str:
    if isinstance(condition.threshold, Multiple):
        return f"{condition.threshold.factor:g} * {baseline_expression(condition.threshold.baseline, names)}"
    return f"{condition.threshold:.12g}"


def _enough_requests(baseline: Baseline, names: Names) -> str:
    window = f"[{_duration(baseline.span_s)}] offset {_duration(baseline.ago_s)}"
    grown = f"increase({_selector(baseline.requests, names, '_count')}{window})"
    return f"{_summed(baseline.requests, grown, names)} >= {baseline.min_requests}"


def _selector(source: Source, names: Names, suffix: str = "") -> str:
    alias = alias_of(source.series, names)
    assert alias is not None, f"{source.series.name} has no such name"
    name = alias.name + ("_total" if source.series.kind == "counter" else suffix)
    matchers = ", ".join(_matcher(alias, label, values) for label, values in source.where)
    return f"{name}{{{matchers}}}" if matchers else name


def _matcher(alias: Alias, label: str, values: Iterable[str]) -> str:
    if alias.values is not None:
        values = [alias.values[value] for value in values if value in alias.values]
    values = list(values)
    label = alias.labels.get(label, label)
    if len(values) == 1:
        return f"{label}={_quoted(values[0])}"
    return f"{label}=~{_quoted('|'.join(_escaped(value) for value in values))}"


def _summed(source: Source, text: str, names: Names) -> str:
    """Sum over the series' own labels."""
    alias = alias_of(source.series, names)
    assert alias is not None
    labels = [alias.labels.get(label, label) for label in source.series.labels]
    return f"sum without ({', '.join(labels)}) ({text})" if labels else text


def _duration(seconds: int) -> str:
    for unit_s, name in ((3600, "h"), (60, "m")):
        if seconds and seconds % unit_s == 0:
            return f"{seconds // unit_s}{name}"
    return f"{seconds}s"


def _escaped(text: str) -> str:
    """Escape what is special in a regular expression."""
    return re.sub(r"([.^$*+?()\[\]{}|\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
