"""Rewrites what is generated from the code, tables of the documentation and the Grafana dashboard: `make tables`."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.cli.removed_flags import table as removed_flags
from headrace.cli.serving_table import counts_table as vllm_flag_counts
from headrace.cli.serving_table import table as server_options
from headrace.doctor.report import rules_table
from headrace.models.families_table import table as families
from headrace.monitor.grafana import dashboard
from headrace.monitor.page import alerts_table, metrics_table
from headrace.plan.markdown import accuracy_table, gpu_table, serving_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GRAFANA = ROOT / "examples/grafana-dashboard.json"
PLAN_ACCURACY = json.loads((ROOT / "benchmarks/results/plan-accuracy.json").read_text(encoding="utf-8"))
TABLES = (
    ("metrics.md", metrics_table()),
    ("monitoring.md", alerts_table()),
    ("serving-operations.md", server_options()),
    ("serving-operations.md", removed_flags()),
    ("coming-from-vllm.md", vllm_flag_counts()),
    ("models.md", families()),
    ("doctor.md", rules_table()),
    ("plan.md", accuracy_table(PLAN_ACCURACY)),
    ("plan.md", serving_table(PLAN_ACCURACY)),
    ("plan.md", gpu_table()),
)


def replace_table(text: str, table: str) -> str:
    """Replace the table with the same header row."""
    table = table.rstrip("\n") + "\n"
    header = table.splitlines(keepends=True)[0]
    before, found, after = text.partition(header)
    if not found:
        raise SystemExit(f"no table with the header {header.strip()!r}")
    rest = after.splitlines(keepends=True)
    num_rows = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return before + table + "".join(rest[num_rows:])


def main() -> None:
    for name, table in TABLES:
        page = DOCS / name
        page.write_text(replace_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
    GRAFANA.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
