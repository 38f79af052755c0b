"""The entry point of `headrace`: imports only the given command and reports errors in one line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.cli.messages import open_missing_stderr, print_line, print_text
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError, HeadraceError, ModelNotFoundError, nearest
from headrace.version import __version__

FAILED, USAGE, STOPPED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str


COMMANDS = {
    "run": Command("headrace.cli.run", "run a batch job: answer a file of prompts"),
    "serve": Command("headrace.cli.serve", "serve a model over HTTP with OpenAI's API"),
    "route": Command("headrace.cli.route", "spread requests over several servers by prefix, load and health"),
    "bench": Command("headrace.cli.bench.main", "measure this engine, vLLM or any OpenAI-compatible server"),
    "tune": Command("headrace.cli.tune", "find the settings that are fastest for a workload, and prove it"),
    "checkpoint": Command("headrace.cli.checkpoint", "a decision about settings as a file that can be verified"),
    "status": Command("headrace.cli.status", "show the progress of a job, and its answers so far"),
    "cancel": Command("headrace.cli.cancel", "stop a job permanently"),
    "clean": Command("headrace.cli.clean", "remove the files of a finished job"),
    "chat": Command("headrace.cli.chat", "chat with a model in the terminal"),
    "profile": Command("headrace.cli.profile", "show where a step's time goes, in a run or on a live server"),
    "plan": Command("headrace.cli.plan", "predict whether a model fits on a GPU, and how fast it runs"),
    "quantize": Command("headrace.cli.quantize", "write an FP8, INT8 or INT4 checkpoint with its measured loss"),
    "compile": Command("headrace.cli.compile", "compile a model's GPU kernels ahead of time, without the GPU"),
    "top": Command("headrace.cli.top", "show live what a server does: throughput, latencies, queue, cache, GPUs"),
    "doctor": Command("headrace.cli.doctor", "name what limits a server, benchmark or job, and what to change"),
    "alerts": Command("headrace.cli.alerts", "print alerts for Prometheus, as a rule file"),
    "grafana": Command("headrace.cli.grafana", "print a dashboard for Grafana"),
    "models": Command("headrace.cli.models", "list, fetch and remove models on this machine"),
}

EXAMPLES = """\
examples:
  headrace run prompts.jsonl -o answers.jsonl     with the default model, which needs no account
  headrace run prompts.jsonl -o answers.jsonl --model Qwen/Qwen3-0.6B --max-tokens 256
  headrace serve Qwen/Qwen3-0.6B --port 8000
  headrace chat

'headrace COMMAND --help' lists a command's options. HEADRACE_DEBUG=1 shows the traceback of an error."""


class CommandModule(Protocol):
    def main(self, arguments: Sequence[str]) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 error, 2 wrong usage or a wrong setting, 130 Ctrl-C; `run` has more."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    open_missing_stderr()
    try:
        return _dispatch(given)
    except HeadraceError as error:
        if _is_debugging():
            raise
        print_line(f"error: {error}")
        return USAGE if isinstance(error, (ConfigError, ModelNotFoundError)) else FAILED
    except KeyboardInterrupt:
        if _is_debugging():
            raise
        print_text("\nheadrace: stopped")
        return STOPPED
    except BrokenPipeError:
        # The reader of stdout is gone: discard what would be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dispatch(given: list[str]) -> int:
    if given and not given[0].startswith("-"):
        return load_command(given[0]).main(given[1:])
    parser = _top_parser()
    parser.parse_args(given)
    parser.print_help()
    return 0


def load_command(name: str) -> CommandModule:
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        _top_parser().error(f"unknown command {name!r}{nearest(name, COMMANDS)} (commands: {known})")
    module: CommandModule = importlib.import_module(COMMANDS[name].module)
    return module


def _top_parser() -> CommandParser:
    commands = "\n".join(f"  {name:<12}{command.help}" for name, command in COMMANDS.items())
    parser = CommandParser(
        prog="headrace",
        usage="headrace COMMAND [options]",
        description=f"LLM batch jobs and serving with as little waste as the hardware allows.\n\ncommands:\n{commands}",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    return parser


def _is_debugging() -> bool:
    return os.environ.get("HEADRACE_DEBUG", "") not in ("", "0")
