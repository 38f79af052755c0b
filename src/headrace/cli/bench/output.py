"""Where a benchmark's record and report go, and the progress of a running one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import RECORDS
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.outcomes import Outcome
    from headrace.bench.report.document import Report


def say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def finish(given: argparse.Namespace, record: dict[str, Any], rows: Sequence[Sequence[Outcome]] = ()) -> None:
    """Write the record, then print and write its report: a report that fails must not cost the figures."""
    from headrace.bench.record import RecordError, write_record

    path = given.output or Path(RECORDS) / f"{record['id']}.json"
    failure: RecordError | None = None
    try:
        write_record(record, path, rows)
    except RecordError as error:
        failure = error  # the figures are shown before it is raised
    show(given, report_of(record, path.parent), page=path.with_suffix(".html") if given.output is None else None)
    if failure is not None:
        raise failure
    say(f"record: {path}")


def report_of(record: dict[str, Any], directory: Path | None = None) -> Report:
    """The report of a record of a benchmark or a tune. `directory` holds the request rows, if they were kept."""
    if record.get("kind") == "tune":
        from headrace.tune.report import tune_report

        return tune_report(record)
    from headrace.bench.report.build import build_report

    return build_report(record, directory)


def write_checkpoint_of(record: dict[str, Any], path: Path) -> None:
    """Write the checkpoint of a record. A record without figures has none, which is said."""
    from headrace.checkpoint.create import from_records, with_hub_digest
    from headrace.checkpoint.document import CheckpointError, write_checkpoint

    try:
        checkpoint = write_checkpoint(with_hub_digest(from_records([record])), path)
    except CheckpointError as error:
        say(f"no checkpoint was written: {error}")
        return
    say(f"checkpoint: {path}")
    say(f"decision: {checkpoint.at('decision', 'text')}")


def check_output(given: argparse.Namespace) -> None:
    """Refuse, before anything is measured, a place where nothing can be written."""
    for path in (given.output, given.html, given.markdown):
        directory = Path(RECORDS) if path is None else path.parent
        nearest = next(parent for parent in (directory, *directory.resolve().parents) if parent.exists())
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            raise ConfigError(
                f"{path or directory} cannot be written: {nearest} is not a directory that can be written to"
            )


def show(given: argparse.Namespace, report: Report, page: Path | None = None) -> None:
    """Print a report, and write it as `--html` and `--markdown` say; `page` is where the page goes otherwise."""
    from headrace.bench.report.markdown import markdown
    from headrace.bench.report.page import write_page
    from headrace.bench.report.terminal import print_report

    print_report(report, sys.stdout)
    try:
        if (page := given.html or page) is not None:
            write_page(report, page)
            say(f"page: {page}")
        if given.markdown is not None:
            given.markdown.write_text(markdown(report), encoding="utf-8")
            say(f"Markdown: {given.markdown}")
    except OSError as error:
        say(f"the report could not be written: {error}")


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
