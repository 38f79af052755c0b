"""Prints the metrics table of docs/metrics.md: `python -m headrace.monitor.page`."""

from __future__ import annotations

import sys

from headrace.monitor.series import Series
from headrace.monitor.table import SERIES


def metrics_table() -> str:
    rows = ["| series | kind | what it is | also as | alerts in guides |", "| --- | --- | --- | --- | --- |"]
    rows += [_row(series) for series in SERIES]
    return "".join(f"{row}\n" for row in rows)


def _row(series: Series) -> str:
    suffix = "_total" if series.kind == "counter" else ""
    labels = f" by {', '.join(f'`{label}`' for label in series.labels)}" if series.labels else ""
    aliases = ", ".join(
        f"`{alias.name}{suffix}`" + ("" if alias.constant is None else f" (always {alias.constant:g})")
        for alias in series.aliases
    )
    return f"| `{series.name}{suffix}`{labels} | {series.kind} | {series.help} | {aliases} | {series.alert} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_table())
