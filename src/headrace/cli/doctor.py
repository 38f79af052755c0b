"""`headrace doctor`: what limits a server, a benchmark or a job, and what is wrong with a planned command line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from headrace.doctor.evidence import Evidence
    from headrace.plan.gpus import Gpu
    from headrace.plan.shape import ModelShape

NOTHING_WRONG, PROBLEMS, TOO_LITTLE = 0, 3, 4
DEFAULT_INTERVAL_S = 10.0
FIXES = ("first", "all")
EPILOG = """\
examples:
  headrace doctor http://127.0.0.1:8000                   a live server: two scrapes, 10 seconds apart
  headrace doctor record.json                             a record of headrace bench, or a --json-summary of a job
  headrace doctor --gpu H100 -- vllm serve Qwen/Qwen3-8B --max-num-seqs 2048
  headrace doctor "headrace serve smollm2 --max-num-batched-tokens 0"
  headrace doctor record.json --fix                       test the first advice against the settings as they are

exit codes:
  0    nothing wrong in what could be judged; with --fix, also: a change is shown to be better
  1    an error, such as a server that does not answer
  2    wrong usage
  3    problems or mistakes were found; with --fix: and no tested change is shown to be better
  4    not enough evidence to judge
  75   with --fix: stopped early (Ctrl-C); the same command continues"""


def main(arguments: Sequence[str]) -> int:
    own, command = _divided(arguments)
    parser = build_parser()
    given = parser.parse_args(_with_choice(own))
    try:
        evidence = _read(parser, given, command)
    except (ConfigError, ModelError) as error:
        parser.error(str(error))
    from headrace.doctor.diagnosis import diagnose

    diagnosis = diagnose(evidence)
    code = None
    if given.fix is not None and diagnosis.outcome != "not enough evidence":
        from headrace.cli.doctor_fix import fix

        try:
            code = fix(given, diagnosis)
        except ConfigError as error:
            parser.error(str(error))
        if given.json:
            return code
    if given.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        from headrace.bench.report.terminal import print_report
        from headrace.doctor.report import report_of

        print_report(report_of(diagnosis), sys.stdout)
    if code is not None:
        return code
    codes = {"nothing wrong": NOTHING_WRONG, "problems found": PROBLEMS, "not enough evidence": TOO_LITTLE}
    return codes[diagnosis.outcome]


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace doctor",
        usage="headrace doctor (ADDRESS | RECORD | -- COMMAND ...) [options]",
        description="Names what limits a server, a benchmark or a job, with numbers, and what to change.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "record", nargs="?", metavar="RECORD", help="an address, a record, a job's summary, or a quoted command"
    )
    parser.add_argument(
        "--url", metavar="ADDRESS", help="a live server with /metrics: Headrace, vLLM or SGLang; with --, its command"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"time between the two scrapes (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the server's key (default: HEADRACE_API_KEY)"
    )
    known = parser.add_argument_group("what the evidence does not say", "needed for predictions")
    known.add_argument("--model", metavar="NAME", help="the model's shape: a name or path, as for headrace plan")
    known.add_argument("--gpu", metavar="NAME", help="such as H200, as for headrace plan")
    known.add_argument("--input-len", type=int, metavar="N", help="mean prompt length of a planned load")
    known.add_argument("--output-len", type=int, metavar="N", help="mean answer length of a planned load")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    _add_fix_flags(parser)
    return parser


def _add_fix_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group(
        "testing advice",
        "starts engines on this machine. A record says what to run; a command, a server or a job's summary need a "
        "workload: --data, --workload, or --input-len and --output-len",
    )
    group.add_argument(
        "--fix",
        choices=FIXES,
        metavar="all",
        help="measure the first advice that is a setting against the settings as they are; all: and the next, until "
        "one is shown to be better",
    )
    group.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved, of both (default: 5)")
    group.add_argument("--workload", metavar="NAME", help="as for headrace bench")
    group.add_argument("--data", metavar="FILE", help="prompts, or the input of a job")
    group.add_argument("--num-requests", type=int, metavar="N", help="of the workload")
    group.add_argument("--concurrency", type=int, metavar="N", help="clients; default: all requests at once")
    group.add_argument("--vllm-python", metavar="PATH", help="the Python of the environment that vLLM is installed in")
    group.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the test as a JSON record")


def _with_choice(arguments: list[str]) -> list[str]:
    """`--fix` alone means the first: what follows it is no choice of it, unless it is one."""
    following = [*arguments[1:], ""]
    return [
        f"{word}=first" if word == "--fix" and after not in FIXES else word
        for word, after in zip(arguments, following, strict=False)
    ]


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Doctor's own arguments, and the command after `--`."""
    given = list(arguments)
    if "--" not in given:
        return given, []
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _read(parser: CommandParser, given: argparse.Namespace, command: list[str]) -> Evidence:
    if not command and given.record is not None and given.url is None and _is_command(given.record):
        command, given.record = [given.record], None
    if given.url is None and given.record is not None and given.record.startswith(("http://", "https://")):
        given.url, given.record = given.record, None
    kinds = [given.url is not None, given.record is not None, bool(command)]
    if not any(kinds):
        parser.error("needs the ADDRESS of a server, a RECORD or a command after --")
    if given.record is not None and (given.url is not None or command):
        parser.error("a RECORD is judged alone; leave out --url and the command")
    if given.interval <= 0:
        parser.error(f"--interval must be above 0, got {given.interval:g}")
    evidence = _of_command(given, command) if command else None
    if given.record is not None:
        from headrace.doctor.readers.records import read_record

        evidence = read_record(Path(given.record))
    if given.url is not None:
        evidence = _of_server(given, evidence)
    assert evidence is not None
    return _completed(given, evidence)


def _is_command(text: str) -> bool:
    return " " in text.strip() and not Path(text).exists()


def _of_command(given: argparse.Namespace, command: list[str]) -> Evidence:
    from headrace.doctor.readers.command_line import read_command

    return read_command(
        command,
        headrace_flags=_flags_of,
        gpu=_gpu(given),
        model=_model(given),
        prompt_len=given.input_len,
        output_len=given.output_len,
    )


def _flags_of(action: str) -> list[str]:
    """The flags of `headrace serve` or `headrace run`."""
    from headrace.cli.main import COMMANDS

    parser: CommandParser = importlib.import_module(COMMANDS[action].module).build_parser()
    return parser.flags


def _of_server(given: argparse.Namespace, command: Evidence | None) -> Evidence:
    """A server's evidence. A command beside it gives the settings that /metrics does not have."""
    from headrace.doctor.readers.live import read_live

    live = read_live(given.url, interval_s=given.interval, api_key=key_of(given))
    if command is None:
        return live
    settings = {**command.settings, **live.settings}
    return replace(live, settings=settings, given=command.given, model=command.model or live.model)


def key_of(given: argparse.Namespace) -> str | None:
    """The key of the live server."""
    key = os.environ.get(given.api_key_env or "HEADRACE_API_KEY")
    if given.api_key_env is not None and key is None:
        raise ConfigError(f"--api-key-env: {given.api_key_env} is not set")
    return key


def _completed(given: argparse.Namespace, evidence: Evidence) -> Evidence:
    """What the user says of model and GPU comes before what was found."""
    return replace(
        evidence,
        model=_model(given) or evidence.model,
        gpu=_gpu(given) or evidence.gpu,
        prompt_len=given.input_len or evidence.prompt_len,
        output_len=given.output_len or evidence.output_len,
    )


def _gpu(given: argparse.Namespace) -> Gpu | None:
    if given.gpu is None:
        return None
    from headrace.plan.gpus import find_gpu

    return find_gpu(given.gpu)


def _model(given: argparse.Namespace) -> ModelShape | None:
    if given.model is None:
        return None
    from headrace.plan.source import find_shape

    return find_shape(given.model)
