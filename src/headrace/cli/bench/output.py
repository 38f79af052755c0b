"""Where a benchmark's record and report go, and the progress of a running one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import RECORDS

if TYPE_CHECKING:
    from headrace.bench.outcomes import Outcome


def say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def finish(given: argparse.Namespace, record: dict[str, Any], rows: Sequence[Sequence[Outcome]] = ()) -> None:
    """Write the record, then its reports: a report that cannot be written must not cost the figures."""
    from headrace.bench.record import write_record
    from headrace.bench.report import report_of, write_markdown, write_page
    from headrace.bench.report.terminal import print_report

    path = given.output or Path(RECORDS) / f"{record['id']}.json"
    report = report_of(record, rows)
    print_report(report)
    write_record(record, path, rows)
    say(f"record: {path}")
    page = given.html or (path.with_suffix(".html") if given.output is None else None)
    if page is not None:
        write_page(report, page)
        say(f"report: {page}")
    if given.markdown is not None:
        write_markdown(report, given.markdown)
        say(f"report: {given.markdown}")


class ProgressLine:
    """One line that is rewritten on a terminal, and a line every ten seconds elsewhere."""

    EVERY_S = 10.0

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = 0.0

    def show(self, text: str, seconds: float) -> None:
        if self._is_quiet:
            return
        if self._is_terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif seconds - self._shown_s >= self.EVERY_S or seconds < self._shown_s:
            self._shown_s = seconds
            say(text)

    def clear(self) -> None:
        self._shown_s = 0.0
        if self._is_terminal and not self._is_quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
