"""`headrace route`: one address in front of several OpenAI-compatible servers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.engine_flags import add_field_flags
from headrace.cli.messages import print_line
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError
from headrace.logs import set_up_logs
from headrace.server.route.options import RouteOptions

KEY_VARIABLE = "HEADRACE_API_KEY"
EPILOG = """\
examples:
  headrace route http://gpu-1:8000 http://gpu-2:8000      on http://127.0.0.1:8080
  headrace route --replicas-file replicas.txt --host 0.0.0.0
  headrace route dns+http://headrace-replicas:8000        each address that the name has

Replicas are servers of Headrace, vLLM or any other with OpenAI's API. Clients send their own keys, which are passed on.

exit codes:
  0    stopped by a signal, all requests answered
  1    the router could not start, or requests were aborted at shutdown
  2    wrong usage"""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    key = os.environ.get(given.api_key_env or KEY_VARIABLE)
    if given.api_key_env is not None and key is None:
        parser.error(f"--api-key-env: {given.api_key_env} is not set")
    if not given.urls and given.replicas_file is None:
        parser.error("name the addresses of replicas, or a file of them with --replicas-file")
    names = [field.name for field in dataclasses.fields(RouteOptions)]

    from headrace.server.route.serve import serve_route
    from headrace.server.route.sources import Sources

    try:
        options = RouteOptions(**{name: getattr(given, name) for name in names if hasattr(given, name)})
        sources = Sources(given.urls, None if given.replicas_file is None else Path(given.replicas_file))
    except ConfigError as error:
        parser.error(str(error))
    set_up_logs(options.log_format)
    return serve_route(options, sources, api_key=key, print_line=print_line)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace route",
        usage="headrace route [URL ...] [options]",
        description="Spreads requests over several servers by prefix, load and health.",
        epilog=EPILOG,
    )
    parser.add_argument("urls", nargs="*", metavar="URL", help="address of a replica, or dns+http://NAME:PORT")
    parser.add_argument(
        "--replicas-file", metavar="FILE", help="file with an address per line; read again when it changes"
    )
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help=f"environment variable with a key for the replicas' /metrics (default: {KEY_VARIABLE})",
    )
    add_field_flags(parser.add_argument_group("settings"), RouteOptions, dataclasses.fields(RouteOptions))
    return parser
