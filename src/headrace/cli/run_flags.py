"""The flags of `headrace run` that are about the job, not the engine."""

from __future__ import annotations

import argparse
import math
import os

from headrace.cli.checkpoint import writable
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError


def add_job_flags(parser: CommandParser) -> None:
    """In the order of the help."""
    _add_files(parser)
    _add_lines_to_compute(parser)
    _add_stopping(parser)
    _add_workers(parser)
    _add_limits(parser)
    _add_parsers_and_reports(parser)


def _add_files(parser: CommandParser) -> None:
    parser.add_argument("input", metavar="INPUT", help="a file (JSONL, CSV, TSV, Parquet), a URL, or - for stdin")
    parser.add_argument("-o", "--output", metavar="OUTPUT", help="the file of answers, or - for stdout")
    parser.add_argument(
        "--check", action="store_true", help="only check for lines that cannot be answered, without loading the model"
    )
    parser.add_argument(
        "--rate",
        metavar="X",
        help="with --check: tokens per second, or an earlier --json-summary, to estimate the time from",
    )


def _add_lines_to_compute(parser: CommandParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="compute all lines again; replaces OUTPUT and its job")
    parser.add_argument("--keep-order", action="store_true", help="answers in the order of INPUT, not as they finished")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--retry-errors", action="store_true", help="compute the lines again that became error lines")
    again.add_argument(
        "--redo", metavar="WHERE", help="compute lines again by their answers, such as 'finish_reason=length'"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the lines that are computed again",
    )


def _add_stopping(parser: CommandParser) -> None:
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds for lines in flight to finish after a stop (default: 10)",
    )
    parser.add_argument(
        "--deadline",
        metavar="TIME",
        help="lines that are unfinished then become error lines: 2h30m after the job started, or 2026-12-01T06:00",
    )
    parser.add_argument(
        "--disk-wait",
        type=_duration,
        default=3600.0,
        metavar="TIME",
        help="how long to wait for space on a full disk, such as 30m (default: 1h)",
    )


def _add_workers(parser: CommandParser) -> None:
    parser.add_argument(
        "--workers",
        type=_num_workers,
        metavar="N",
        help="engines side by side on this machine, which divide its cores, memory and GPUs, or 'auto' (default): one "
        "for each visible GPU, one on a CPU",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the workers on the machines of the Ray cluster at HOST:PORT, or 'auto' for the one that this machine "
        "belongs to; --workers is then how many the job may have there, by default as many as the cluster holds",
    )


def _add_limits(parser: CommandParser) -> None:
    parser.add_argument("--limit", type=_at_least_one, metavar="N", help="answer only the first N lines")
    parser.add_argument(
        "--max-error-rate",
        type=_share,
        default=0.1,
        metavar="X",
        help="stop if more than this share of at least 1,000 lines are errors; 1 never stops (default: 0.1)",
    )


def _add_parsers_and_reports(parser: CommandParser) -> None:
    parser.add_argument(
        "--gpu-price", type=_price, metavar="X", help="price of the GPU per hour, for the cost in the summary"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="serve the job's counters for Prometheus at http://127.0.0.1:N/metrics while it runs; 0: any free port",
    )
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="format of tool calls in answers to OpenAI's chat lines (default: by the chat template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="format of reasoning in them, or none to leave it in the text (default: by the chat template)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary, errors only")
    parser.add_argument("--json-summary", type=_in_a_directory, metavar="PATH", help="write the summary as JSON too")
    parser.add_argument(
        "--checkpoint",
        type=writable,
        metavar="FILE",
        help="write settings, versions, hardware and the job's figures as a checkpoint",
    )


def add_table_flags(parser: CommandParser) -> None:
    from headrace.jobs.formats.file_format import FORMATS

    group = parser.add_argument_group(
        "tables", "when INPUT has columns instead of requests; all columns are copied to the output"
    )
    group.add_argument("--prompt", metavar="TEXT", help="the prompt, with {column} for a column and {{ for a brace")
    group.add_argument(
        "--system", metavar="TEXT", help="a system prompt, in the same form; the prompt is then a message"
    )
    group.add_argument("--chat", action="store_true", help="the prompt is a user message, also without --system")
    group.add_argument("--messages-column", metavar="NAME", help="a column that holds lists of messages")
    formats = ", ".join(FORMATS)
    group.add_argument("--input-format", choices=FORMATS, metavar="F", help=f"if the name does not show it: {formats}")
    group.add_argument("--output-format", choices=FORMATS, metavar="F", help="the same for OUTPUT")


def _duration(text: str) -> float:
    from headrace.jobs.times import read_duration

    try:
        return read_duration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _num_workers(text: str) -> int | None:
    return None if text == "auto" else _at_least_one(text)


def _price(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _in_a_directory(path: str) -> str:
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise argparse.ArgumentTypeError(f"the directory of {path} does not exist")
    return path
