"""`headrace top`: what a running server does, live."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from time import sleep
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.top.watch import Reading, Watch

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_INTERVAL_S = 2.0
KEY_VARIABLE = "HEADRACE_API_KEY"
EPILOG = """\
examples:
  headrace top                                    a server on this machine
  headrace top http://gpu-7:8000 --interval 5     Headrace, vLLM or SGLang; Ctrl-C ends it
  headrace top --once                             two scrapes, then the figures as text
  headrace top --json | jq .figures.generated_per_s

exit codes:
  0    ended by Ctrl-C, or the figures were printed
  1    an error, such as a server that does not answer (--once and --json)
  2    wrong usage"""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    if given.interval <= 0:
        parser.error(f"--interval must be above 0, got {given.interval:g}")
    key = os.environ.get(given.api_key_env or KEY_VARIABLE)
    if given.api_key_env is not None and key is None:
        parser.error(f"--api-key-env: {given.api_key_env} is not set")

    from headrace.scrape.client import ServerClient
    from headrace.top.watch import TIMEOUT_S, Watch

    watch = Watch(ServerClient(given.url, api_key=key, timeout_s=TIMEOUT_S))
    if given.json or given.once or not sys.stdout.isatty():
        reading = read_once(watch, given.interval)
        _print(reading, as_json=given.json)
        return 0
    from rich.console import Console

    from headrace.top.live import show_live

    show_live(watch, Console(highlight=False), interval_s=given.interval)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace top",
        usage="headrace top [URL] [options]",
        description="Shows what a running server does: throughput, latencies, queue, KV cache, GPUs and bottleneck.",
        epilog=EPILOG,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}")
    parser.add_argument(
        "--interval",
        type=float,
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"time between two scrapes, over which all rates are (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the figures of one interval as text; also if stdout is no terminal"
    )
    parser.add_argument("--json", action="store_true", help="print the figures of one interval as JSON")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help=f"environment variable with the server's key (default: {KEY_VARIABLE})"
    )
    return parser


def read_once(watch: Watch, interval_s: float) -> Reading:
    """Two scrapes. Raises HeadraceError if one fails: a script must not take it for an idle server."""
    for _ in range(2):
        reading = watch.read()
        if reading.failure is not None:
            raise HeadraceError(reading.failure)
        if reading.figures is not None and reading.figures.seconds is None:
            sleep(interval_s)
    return reading


def _print(reading: Reading, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(reading.as_json(), indent=2, allow_nan=False))
        return
    from headrace.top.view import plain_text

    sys.stdout.write(plain_text(reading))
