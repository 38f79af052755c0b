"""`headrace status`: shows a job's progress, and its results so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser

if TYPE_CHECKING:
    from headrace.jobs.store.job_view import JobView


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.jobs.store.job_view import find_job, view_job

    found = view_job(find_job(given.job))
    if given.results:
        for record in found.records(in_order=given.keep_order):
            sys.stdout.buffer.write(record.result + b"\n")
        sys.stdout.buffer.flush()
    elif given.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found.as_json())).decode())
    else:
        _print(found)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace status",
        usage="headrace status JOB [--results [--keep-order] | --json]",
        description="Show the progress of a job, which may be running. Nothing is changed.",
    )
    parser.add_argument("job", metavar="JOB", help="the output of 'headrace run', or the .job directory beside it")
    parser.add_argument("--results", action="store_true", help="print the committed results, one per line")
    parser.add_argument("--keep-order", action="store_true", help="with --results: in the order of the input")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _print(found: JobView) -> None:
    from headrace.jobs.status.summary import failure_rows
    from headrace.jobs.store.failure_log import FailureCounts

    facts = found.as_json()
    state = facts["state"]
    if facts["holder"] is not None:
        state += f": {facts['holder']}"
    elif facts["reason"] is not None:
        state += f": {facts['reason']}"
    expected = "" if facts["expected"] is None else f" of {facts['expected']:,}"
    rows = [
        ("state", state),
        ("lines done", f"{facts['lines']:,}{expected}"),
        ("error lines", ", ".join(f"{code} {count:,}" for code, count in facts["errors_by_code"].items()) or "0"),
        ("input", facts["input"]),
        ("output", facts["output"]),
        ("model", facts["fingerprint"].get("model")),
        ("started", f"{facts['created']}; run {facts['epoch']:,} times" if facts["epoch"] > 1 else facts["created"]),
        ("journal", f"{facts['bytes']:,} bytes in {facts['directory']}"),
    ]
    rows += failure_rows(FailureCounts(**facts["trouble"]))
    if facts["redo"] is not None:
        rows.append(("redo", f"{facts['redo']} (pass {facts['pass']})"))
    if found.status is not None:
        from headrace.jobs.status.console import plain_line

        rows.insert(1, ("now", plain_line(found.status)))
    for name, value in rows:
        print(f"{name:<13}{value}")
