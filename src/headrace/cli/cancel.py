"""`headrace cancel`: stops a running job; marks one that does not run, so that its command does not continue it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.jobs.store.cancel import cancel, undo
    from headrace.jobs.store.job_view import find_job

    directory = find_job(given.job)
    print(f"headrace: {undo(directory) if given.undo else cancel(directory)}")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace cancel",
        usage="headrace cancel JOB [--undo]",
        description="Stop a job for good. What it has committed is kept: 'headrace status JOB --results' prints it.",
    )
    parser.add_argument("job", metavar="JOB", help="the output of 'headrace run', or the .job directory beside it")
    parser.add_argument(
        "--undo", action="store_true", help="let a cancelled job continue when its command is run again"
    )
    return parser
