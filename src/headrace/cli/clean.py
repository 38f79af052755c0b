"""`headrace clean`: removes the journals of finished jobs."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)

    from headrace.jobs.store.clean import clean
    from headrace.jobs.store.job_view import find_job

    for directory in [find_job(job) for job in given.jobs]:
        num_bytes = clean(directory, force=given.force)
        print(f"headrace: removed {directory}, {num_bytes:,} bytes")
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace clean",
        usage="headrace clean JOB ... [--force]",
        description="Remove the journal of completed jobs. Their outputs stay; lines can no longer be computed again.",
    )
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="an output of 'headrace run', or its .job directory")
    parser.add_argument(
        "--force", action="store_true", help="also for jobs that are not completed: their results are lost"
    )
    return parser
