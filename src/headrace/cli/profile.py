"""`headrace profile`: where a step's time goes, against the ceiling of each part."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.profile.report import Report

WORKLOADS = ("decode", "prefill", "chat")
DIRECTORY = "headrace-profile"

EPILOG = """\
examples:
  headrace profile                                     the default model on this machine, decode steps
  headrace profile ./my-model --workload chat --seconds 5 --picture step.html
  headrace profile --url http://127.0.0.1:8000         a live server, started with --profiler-dir
  headrace profile --trace headrace-profile/x.profile.json

The trace opens in https://ui.perfetto.dev. Keys for --url: --api-key, HEADRACE_ADMIN_KEY or HEADRACE_API_KEY."""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    if given.trace is not None:
        return _analyse(given)
    if given.url is not None:
        return _profile_server(given)
    return _profile_run(given, _config(parser, given), arguments)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace profile",
        usage="headrace profile [MODEL] [options]\n"
        "       headrace profile --url URL [options]\n"
        "       headrace profile --trace FILE [options]",
        description="Record a steady window of steps, and split the mean step into GEMMs, attention, cache traffic, "
        "sampling and\nhost gaps, each against its ceiling on this device.",
        epilog=EPILOG,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    source = parser.add_argument_group("source", "a run in this process, unless one of these is given")
    source.add_argument("--url", metavar="URL", help="profile this server: Headrace with --profiler-dir, or vLLM")
    source.add_argument("--api-key", metavar="KEY", help="key for --url; the admin key if the server has one")
    source.add_argument("--trace", metavar="FILE", help="analyse a recorded trace or record; needs no torch")
    load = parser.add_argument_group("workload", "of a run in this process")
    load.add_argument("--workload", choices=WORKLOADS, default="decode", help="kind of steps (default: decode)")
    load.add_argument("--num-seqs", type=_count, metavar="N", help="sequences at once; default: as many as fit")
    load.add_argument("--input-len", type=_count, metavar="N", help="tokens of a prompt; default: by the workload")
    load.add_argument("--output-len", type=_count, metavar="N", help="tokens of an answer; default: by the workload")
    window = parser.add_argument_group("window")
    window.add_argument("--seconds", type=_seconds, default=2.0, metavar="X", help="length of a window (default: 2)")
    window.add_argument("--steps", type=_count, metavar="N", help="length of a window in steps, instead of seconds")
    window.add_argument(
        "--windows", type=_count, default=2, metavar="N", help="recorded windows, each between two without (default: 2)"
    )
    window.add_argument(
        "--tool", choices=("torch", "cuda"), default="torch", help="cuda: only mark the window, for nsys and ncu"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--dir", metavar="DIR", default=DIRECTORY, help=f"for trace and record (default: {DIRECTORY})")
    output.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the table")
    output.add_argument("--picture", metavar="FILE", help="write the pictures as one HTML page")
    add_engine_flags(parser)
    return parser


def _check(parser: CommandParser, given: argparse.Namespace) -> None:
    sources = [name for name in ("url", "trace") if getattr(given, name) is not None]
    if given.positional_model is not None:
        sources.append("MODEL")
    if len(sources) > 1:
        parser.error(f"give one of MODEL, --url and --trace, not {' and '.join(sources)}")
    if given.api_key is not None and given.url is None:
        parser.error("--api-key is for --url")
    if given.url is not None and given.steps is not None:
        parser.error("--steps is for a run in this process; give --seconds")
    if given.steps is not None and given.steps > 10_000:
        parser.error(f"--steps must be at most 10,000, got {given.steps:,}")
    if given.seconds > 60 and given.steps is None:
        parser.error(f"--seconds must be at most 60, got {given.seconds:g}: traces grow by megabytes per second")
    if given.tool == "cuda" and (given.json or given.picture or given.trace):
        parser.error("--tool cuda leaves no trace here to analyse; leave out --json, --picture and --trace")
    for path in (given.json, given.picture):
        if path not in (None, "-") and not os.path.isdir(os.path.dirname(path) or "."):
            parser.error(f"the directory of {path} does not exist")


def _config(parser: CommandParser, given: argparse.Namespace) -> EngineConfig:
    if given.positional_model is not None:
        if getattr(given, "model", given.positional_model) != given.positional_model:
            parser.error(f"two models are given, {given.positional_model!r} and --model {given.model!r}; give one")
        given.model = given.positional_model
    return engine_config(parser, given)


def _analyse(given: argparse.Namespace) -> int:
    from headrace.profile.report import report_of
    from headrace.profile.trace import read_profile

    record, trace = read_profile(given.trace)
    if trace is None:
        raise ConfigError(f"{given.trace} has no trace: it was recorded for NVIDIA's tools")
    _show(report_of(record, trace), given)
    return 0


def _profile_run(given: argparse.Namespace, config: EngineConfig, arguments: Sequence[str]) -> int:
    from headrace.cli.fetching import fetch_if_missing
    from headrace.profile.commands import own_commands
    from headrace.profile.recording import RecordingOptions, record_run
    from headrace.profile.workload import workload_of

    fetch_if_missing(config.model)
    options = RecordingOptions(
        directory=given.dir,
        seconds=given.seconds,
        steps=given.steps,
        num_windows=given.windows,
        num_seqs=given.num_seqs,
        tool=given.tool,
    )
    workload = workload_of(given.workload, given.input_len, given.output_len)
    commands = own_commands(arguments)
    report = record_run(config, workload, options, commands=commands, print_line=_print_line)
    if report is None:
        _print_line("the window was marked; the tool that started this command has the recording")
        return 0
    _show(report, given)
    if report.record is not None:
        _print_line(f"trace: {Path(given.dir) / report.record.trace}")
    return 0


def _profile_server(given: argparse.Namespace) -> int:
    from headrace.profile.commands import server_commands
    from headrace.profile.remote import RemoteServer, profile_server

    key = given.api_key or os.environ.get("HEADRACE_ADMIN_KEY") or os.environ.get("HEADRACE_API_KEY")
    server = RemoteServer(given.url, key)
    found = profile_server(server, seconds=given.seconds, tool=given.tool, print_line=_print_line)
    if found.report is None:
        if found.files:
            raise ConfigError("the server recorded a trace but could not analyse it; it is at " + found.files["trace"])
        _print_line(
            "the window was marked; the tool that started the server has the recording"
            if given.tool == "cuda"
            else "stopped; vLLM writes the trace into the torch_profiler_dir of its --profiler-config, on its machine"
        )
        return 0
    overhead = None if found.overhead is None else found.overhead.text()
    commands: dict[str, str] = {}
    if found.device == "cuda":
        arguments = found.serve_arguments or ("--profiler-dir", DIRECTORY)
        commands = server_commands(server.url, arguments, seconds=given.seconds)
    report: dict[str, Any] = found.report | {"overhead_text": overhead, "commands": commands, "files": found.files}
    if given.json == "-":
        _write_json(report, None)
    else:
        print(found.table, end="")
        print(f"\noverhead: {overhead or 'not measured'}")
        print(f"trace on the server: {found.files.get('trace')}")
        _print_commands(commands)
        if given.json is not None:
            _write_json(report, given.json)
    if given.picture is not None and found.page is not None:
        _write(given.picture, found.page.encode())
    return 0


def _show(report: Report, given: argparse.Namespace) -> None:
    if given.json == "-":
        _write_json(report.as_json(), None)
    else:
        print(report.table(), end="")
        _print_commands(report.commands)
        if given.json is not None:
            _write_json(report.as_json(), given.json)
    if given.picture is not None:
        from headrace.profile.picture import page

        _write(given.picture, page(report).encode())


def _print_commands(commands: dict[str, str]) -> None:
    for name, command in commands.items():
        print(f"\n{name}:\n  {command}")


def _write_json(report: dict[str, Any], path: str | None) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    if path is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        _write(path, text)


def _write(path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _print_line(line: str) -> None:
    print(f"headrace: {line}", file=sys.stderr, flush=True)
