from __future__ import annotations

from pathlib import Path

from headrace.monitor.page import alerts_table, metrics_table
from headrace.monitor.table import SERIES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_have_the_current_table_of_metrics() -> None:
    """If this fails, run `make tables`."""
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Every series\n")[1].split("\n## ")[0]
    rows = "".join(line for line in section.splitlines(keepends=True) if line.startswith("|"))
    assert rows == metrics_table()


def test_the_docs_have_the_current_table_of_alerts() -> None:
    """If this fails, run `make tables`."""
    assert f"\n{alerts_table()}\n" in (DOCS / "monitoring.md").read_text(encoding="utf-8")


def test_metric_names_are_unique() -> None:
    names = [name for series in SERIES for name in (series.name, *(alias.name for alias in series.aliases))]
    assert len(names) == len(set(names))
