"""`headrace alerts`: prints the alerts that come with Headrace as Prometheus rules, JSON or a table."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence

from headrace.cli.parser import CommandParser

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.monitor.alerts import ALERTS, with_thresholds
    from headrace.monitor.page import alerts_table
    from headrace.monitor.promql import as_yaml, exists, rule_file

    alerts = with_thresholds(ALERTS, dict(given.threshold))
    omitted = [alert.name for alert in alerts if not exists(alert, given.names)]
    if given.format == "markdown":
        print(alerts_table(alert for alert in alerts if exists(alert, given.names)), end="")
        return 0
    rules = rule_file(alerts, given.names, dict(given.label))
    print(json.dumps(rules, indent=2) if given.format == "json" else as_yaml(rules), end="")
    if given.format == "json":
        print()
    if omitted:
        print(f"without {', '.join(omitted)}: vLLM does not have their series", file=sys.stderr)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace alerts",
        usage="headrace alerts [--format prometheus|json|markdown] [options] > rules.yml",
        description="Print the alerts that the server evaluates by itself as a rule file for Prometheus.",
    )
    parser.add_argument(
        "--format",
        choices=("prometheus", "json", "markdown"),
        default="prometheus",
        help="rules in YAML (default), the same in JSON, or a table in Markdown",
    )
    parser.add_argument(
        "--names",
        choices=("headrace", "vllm"),
        default="headrace",
        help="names of the series; vllm: for a vLLM server, without the alerts whose series it does not have",
    )
    parser.add_argument(
        "--label", type=_label, action="append", default=[], metavar="KEY=VALUE", help="add a label to each alert"
    )
    parser.add_argument(
        "--threshold",
        type=_threshold,
        action="append",
        default=[],
        metavar="ALERT=NUMBER",
        help="another threshold, such as RequestsWaiting=50; for latencies, the multiple of the baseline",
    )
    return parser


def _label(text: str) -> tuple[str, str]:
    key, has_value, value = text.partition("=")
    if not has_value or not _LABEL.fullmatch(key):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE with a key of letters, digits and _, got {text!r}")
    if key in ("severity", "alertname"):
        raise argparse.ArgumentTypeError(f"{key} is set by the alert")
    return key, value


def _threshold(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be ALERT=NUMBER, got {text!r}")
    return name, value
