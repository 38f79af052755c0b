"""`headrace checkpoint`: a decision about settings as a file that can be checked in and verified."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser
from headrace.errors import nearest

if TYPE_CHECKING:
    from headrace.bench.report.document import Report

NOT_VERIFIED, DOES_NOT_HOLD = 1, 3

DESCRIPTION = """\
A checkpoint is one file with a decision about settings and all that is needed to check it again: versions, model
digest, hardware, command, every setting in force, workload hash and figures.

subcommands:
  create RECORD -o FILE    from a record of 'headrace bench', 'headrace bench sweep' or 'headrace tune'
  show FILE                what it says
  diff A B                 facts and settings that differ, and figures
  verify FILE              measure again, and say whether it still holds

'bench', 'bench sweep', 'run' and 'serve' write one with --checkpoint FILE."""

VERIFY_EPILOG = """\
The workload is made again by its hash. Settings that were given are given again. A figure holds if it is not worse by
more than the tolerance: from the noise of the recorded rounds, and at least 5 % for rates, 10 % for latencies, 1 % for
the share of answered requests (10 %, 25 % and 1 % if one round was recorded). A machine, driver, package or model that
differs is named, and does not end the verification.

exit codes:
  0    the checkpoint holds
  1    it could not be verified: a missing model, an engine that does not start, too much noise
  2    wrong usage
  3    it does not hold"""


def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        return COMMANDS[name](arguments[1:])
    parser = CommandParser(
        prog="headrace checkpoint", usage="headrace checkpoint SUBCOMMAND ...", description=DESCRIPTION
    )
    if name and not name.startswith("-"):
        parser.error(f"unknown subcommand {name!r}{nearest(name, COMMANDS)} (known: {', '.join(COMMANDS)})")
    parser.parse_args(arguments)
    parser.print_help()
    return 0


def create(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="headrace checkpoint create",
        usage="headrace checkpoint create RECORD -o FILE [--decision TEXT]",
        description="Make a checkpoint of a record that 'headrace bench', 'headrace bench sweep' or 'headrace tune' "
        "wrote. Several records of a benchmark in one .jsonl file are rounds of the same measurement.",
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a .json or .jsonl file of records")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the checkpoint")
    parser.add_argument("--decision", metavar="TEXT", help="what is decided, and why (default: what the record shows)")
    given = parser.parse_args(arguments)

    from headrace.bench.record import read_records
    from headrace.checkpoint.create import from_records
    from headrace.checkpoint.document import write_checkpoint

    checkpoint = write_checkpoint(from_records(read_records([given.record]), text=given.decision), given.output)
    print(f"{given.output}: {checkpoint.at('decision', 'text')}")
    return 0


def show(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="headrace checkpoint show",
        usage="headrace checkpoint show FILE",
        description="Print a checkpoint: decision, figures, settings in force, machine and versions.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)

    from headrace.checkpoint.document import read_checkpoint
    from headrace.checkpoint.views import show_report

    _print(show_report(read_checkpoint(given.file), str(given.file)))
    return 0


def diff(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="headrace checkpoint diff",
        usage="headrace checkpoint diff A B",
        description="Print the facts and settings that differ between two checkpoints, and their figures.",
    )
    parser.add_argument("before", type=Path, metavar="A")
    parser.add_argument("after", type=Path, metavar="B")
    given = parser.parse_args(arguments)

    from headrace.checkpoint.document import read_checkpoint
    from headrace.checkpoint.views import diff_report

    sides = read_checkpoint(given.before), read_checkpoint(given.after)
    _print(diff_report(*sides, (str(given.before), str(given.after))))
    return 0


def verify(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="headrace checkpoint verify",
        usage="headrace checkpoint verify FILE [options]",
        description="Measure again what a checkpoint records, and say whether it still holds.",
        epilog=VERIFY_EPILOG,
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=_at_least_one, metavar="N", help="default: as many as recorded; a job: one")
    parser.add_argument("--model", metavar="PATH", help="another place of the model")
    parser.add_argument("--data", metavar="FILE", help="another place of the workload's or the job's file")
    parser.add_argument("--url", metavar="URL", help="another address of the server, for engine openai")
    parser.add_argument(
        "--api-key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable with the server's key (%(default)s)"
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python of the environment that vLLM is installed in")
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="S", help="for the engine to start (%(default)g)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the new figures as a checkpoint")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    given = parser.parse_args(arguments)

    from headrace.checkpoint.document import read_checkpoint, write_checkpoint
    from headrace.checkpoint.rerun import Options
    from headrace.checkpoint.verify import verify
    from headrace.checkpoint.views import verification_report

    checkpoint = read_checkpoint(given.file)
    options = Options(
        num_rounds=given.rounds,
        model=given.model,
        data=given.data,
        url=given.url,
        api_key=os.environ.get(given.api_key_env) if checkpoint.at("engine", "name") == "openai" else None,
        vllm_python=given.vllm_python,
        start_timeout_s=given.start_timeout,
    )
    result = verify(checkpoint, options, say=(lambda line: None) if given.quiet else say)
    _print(verification_report(result, str(given.file)))
    if given.output is not None:
        write_checkpoint(result.facts, given.output)
        say(f"checkpoint of the new figures: {given.output}")
    return {"holds": 0, "not verified": NOT_VERIFIED, "does not hold": DOES_NOT_HOLD}[result.outcome]


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "create": create,
    "show": show,
    "diff": diff,
    "verify": verify,
}


def writable(text: str) -> Path:
    """The type of `--checkpoint FILE` of other commands: refused before anything is measured."""
    path = Path(text)
    nearest_directory = next(parent for parent in (path.parent, *path.resolve().parents) if parent.exists())
    if path.is_dir() or not (nearest_directory.is_dir() and os.access(nearest_directory, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def say(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _print(report: Report) -> None:
    from headrace.bench.report.terminal import print_report

    print_report(report, sys.stdout)
