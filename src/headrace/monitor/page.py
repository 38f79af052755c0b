"""Prints the tables of docs/metrics.md and docs/monitoring.md: `python -m headrace.monitor.page [metrics|alerts]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from headrace.monitor.alerts import ALERTS, Alert
from headrace.monitor.conditions import sources_of
from headrace.monitor.series import Series
from headrace.monitor.table import SERIES
from headrace.monitor.wording import condition_words, duration_words


def metrics_table() -> str:
    rows = [
        "| series | kind | what it is | also as | our alerts | alerts in guides |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows += [_series_row(series) for series in SERIES]
    return "".join(f"{row}\n" for row in rows)


def alerts_table(alerts: Iterable[Alert] = ALERTS) -> str:
    titles = ("alert", "severity", "fires when", "for", "what it means", "what to do")
    rows = [f"| {' | '.join(titles)} |", "| " + "--- | " * (len(titles) - 1) + "--- |"]
    rows += [_alert_row(alert) for alert in alerts]
    return "".join(f"{row}\n" for row in rows)


def _series_row(series: Series) -> str:
    suffix = "_total" if series.kind == "counter" else ""
    labels = f" by {', '.join(f'`{label}`' for label in series.labels)}" if series.labels else ""
    aliases = ", ".join(
        f"`{alias.name}{suffix}`" + ("" if alias.constant is None else f" (always {alias.constant:g})")
        for alias in series.aliases
    )
    alerts = ", ".join(a.name for a in ALERTS if any(source.series is series for source in sources_of(a.condition)))
    return (
        f"| `{series.name}{suffix}`{labels} | {series.kind} | {series.help} | {aliases} | {alerts} | {series.alert} |"
    )


def _alert_row(alert: Alert) -> str:
    held = duration_words(alert.for_s) if alert.for_s else "at once"
    cells = (f"`{alert.name}`", alert.severity, condition_words(alert), held, alert.meaning, alert.advice)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(alerts_table() if sys.argv[1:] == ["alerts"] else metrics_table())
