"""`headrace bench compare`: two records or sets of records, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.cli.bench.flags import add_report_flags
from headrace.cli.bench.output import say, show
from headrace.cli.parser import CommandParser

WORSE = 3

EPILOG = """\
exit codes:
  0    compared
  1    a record cannot be read, or nothing can be compared
  2    wrong usage
  3    with --fail-if-worse: B is worse than A by more than the limit"""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)

    from headrace.bench.compare import compare_paths, parse_limit
    from headrace.bench.report.comparison import comparison_report
    from headrace.errors import ConfigError

    try:
        limit = None if given.fail_if_worse is None else parse_limit(given.fail_if_worse)
    except ConfigError as error:
        parser.error(str(error))
    comparison = compare_paths(given.before, given.after)
    show(given, comparison_report(comparison))
    worse = [] if limit is None else comparison.failures(limit)
    for line in worse:
        say(line)
    return WORSE if worse else 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace bench compare",
        usage="headrace bench compare A B [options]",
        description="Compare two records, or two files or directories of records: the ratio of each figure, B to A, "
        "with its 95 % confidence interval. Differences of machine, versions, model, settings and workload are named.",
        epilog=EPILOG,
    )
    parser.add_argument("before", type=Path, metavar="A", help="a record, or a directory of records")
    parser.add_argument("after", type=Path, metavar="B")
    parser.add_argument(
        "--fail-if-worse", metavar="X%", help="exit with 3 if a figure is shown to be worse by more than this"
    )
    add_report_flags(parser)
    return parser
