"""`headrace bench`: dispatches to its subcommands; without one, measures a workload."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

SUBCOMMANDS = {
    "batching": "headrace.cli.bench.batching",
    "sweep": "headrace.cli.bench.sweep",
    "compare": "headrace.cli.bench.compare",
    "report": "headrace.cli.bench.report",
    "workloads": "headrace.cli.bench.workloads",
}
MEASURE = "headrace.cli.bench.measure"


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    module = importlib.import_module(SUBCOMMANDS.get(name, MEASURE))
    return int(module.main(arguments[1:] if name in SUBCOMMANDS else arguments))
