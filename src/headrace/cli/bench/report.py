"""`headrace bench report`: a record as a page, as Markdown or on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.cli.bench.flags import add_report_flags
from headrace.cli.bench.output import report_of, show
from headrace.cli.parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.bench.record import read_records

    for record in read_records([given.record]):
        show(given, report_of(record, given.record if given.record.is_dir() else given.record.parent))
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace bench report",
        usage="headrace bench report RECORD [--html FILE] [--markdown FILE]",
        description="Print a record that 'headrace bench' or 'headrace tune' wrote, and write it as a page or as "
        "Markdown.",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a .json or .jsonl file of records")
    add_report_flags(parser)
    return parser
