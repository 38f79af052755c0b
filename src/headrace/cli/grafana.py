"""`headrace grafana`: prints a dashboard for Grafana as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from headrace.cli.parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.monitor.grafana import dashboard, omitted

    print(json.dumps(dashboard(given.names), indent=2))
    if missing := omitted(given.names):
        print(f"without the panels {'; '.join(missing)}: vLLM does not have their series", file=sys.stderr)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace grafana",
        usage="headrace grafana [--names headrace|vllm] > dashboard.json",
        description="Print a dashboard for Grafana, to be imported there. Its data source is Prometheus.",
    )
    parser.add_argument(
        "--names",
        choices=("headrace", "vllm"),
        default="headrace",
        help="names of the series; vllm: for a vLLM server, without the panels whose series it does not have",
    )
    return parser
