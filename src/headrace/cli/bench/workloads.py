"""`headrace bench workloads`: lists the named workloads."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    build_parser().parse_args(arguments)

    from headrace.bench.workloads import NAMED

    for name, named in NAMED.items():
        print(f"{name:<10}{named.num_requests:>6,} requests   {named.about}")
    return 0


def build_parser() -> CommandParser:
    return CommandParser(prog="headrace bench workloads", description="List the named workloads.")
