"""`headrace serve`: serves a model with OpenAI's API."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.cli.auto import (
    AutoSettings,
    add_auto_flags,
    check_auto_flags,
    directories,
    find_auto_settings,
    names_checkpoint,
)
from headrace.cli.checkpoint import writable
from headrace.cli.engine_flags import add_engine_flags, add_field_flags
from headrace.cli.messages import print_line
from headrace.cli.node import host_node
from headrace.cli.parser import CommandParser
from headrace.cli.removed_flags import flag_with_words, table, without_other_flags
from headrace.cli.settings_file import read_settings
from headrace.config import EngineConfig
from headrace.engine.settings_file import read_keys
from headrace.errors import ConfigError, HeadraceError
from headrace.logs import LogFormat, set_up_logs
from headrace.other_settings import ALIASES
from headrace.server.options import GROUPS, ServerOptions

if TYPE_CHECKING:
    from headrace.server.serve import OnReady, Server

EPILOG = """\
examples:
  headrace serve                                      the default model on http://127.0.0.1:8000
  headrace serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt
  headrace serve --config server.toml --port 9000     the command line overrides the file
  headrace serve MODEL -tp 8 -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1
  headrace serve MODEL -tp 8 -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless

Keys may also be in HEADRACE_API_KEY, VLLM_API_KEY and HEADRACE_ADMIN_KEY. Nodes need the same secret in
HEADRACE_NODES_SECRET.

exit codes:
  0    stopped by a signal, all requests answered
  1    the server could not start, its engine failed, or requests were aborted at shutdown
  2    wrong usage, or a setting that the engine refuses"""


class Parsed(NamedTuple):
    """The settings of a command line and its file."""

    config: EngineConfig
    options: ServerOptions


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    if "--explain-flags" in arguments:
        print(table(), end="")
        return 0
    set_up_logs(asked_log_format(arguments))  # before the first line: a usage error is JSON too
    parsed = read(parser, arguments)
    given = parser.parse_args(without_other_flags(arguments, lambda line: None, parser))
    check_auto_flags(parser, given)
    if given.headless and parsed.config.node_rank == 0:
        parser.error("--headless is for nodes that only host ranks: add --node-rank, from 1 on")
    if parsed.config.node_rank > 0:
        return host_node(parsed.config)
    auto = _auto_settings(parsed, given) if given.auto else None
    if auto is not None:
        with names_checkpoint(auto):
            parsed = _with(parsed, auto.settings)

    from headrace.cli.fetching import fetch_if_missing
    from headrace.engine.startup_display import terminal
    from headrace.server.serve import serve

    set_up_logs(parsed.options.log_format)
    fetch_if_missing(parsed.config.model)
    on_ready = None
    if given.checkpoint is not None:
        on_ready = _writes_checkpoint(given.checkpoint, parsed.config, arguments)
    with names_checkpoint(auto):
        return serve(parsed.config, parsed.options, print_line=print_line, on_ready=on_ready, terminal=terminal())


def asked_log_format(arguments: Sequence[str]) -> LogFormat:
    """The format of the log before anything is parsed: from the command line, else from its settings file."""
    given = _value_of("--log-format", arguments)
    path = _value_of("--config", arguments)
    if given is None and path is not None:
        try:
            keys = read_keys(path)
        except ConfigError:
            keys = {}  # `read` reports it
        given = keys.get("log-format", keys.get("log_format"))
    return "json" if given == "json" else "text"


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The last value of a flag."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace serve",
        usage="headrace serve [MODEL] [options]",
        description="Serve a model over HTTP with OpenAI's API. On SIGTERM, running requests finish first.",
        epilog=EPILOG,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML file with these options as keys")
    parser.add_argument(
        "--explain-flags",
        action="store_true",
        help="list the flags of vLLM and TensorRT-LLM that Headrace does not have, and their replacements",
    )
    parser.add_argument(
        "--checkpoint",
        type=writable,
        metavar="FILE",
        help="write settings, versions, hardware and a self-check of four requests as a checkpoint, then serve",
    )
    parser.add_argument(
        "--headless",
        action="store_true",
        help="serve no HTTP: only host this node's processes of the engine on node 0 (with --node-rank above 0)",
    )
    add_auto_flags(parser)
    for title, description, fields in option_groups():
        add_field_flags(parser.add_argument_group(title, description), ServerOptions, fields, ALIASES)
    add_engine_flags(parser, ALIASES)
    return parser


def read(parser: CommandParser, arguments: Sequence[str]) -> Parsed:
    """Parse the command line, which overrides the file. An invalid value is a usage error."""
    try:
        given = parser.parse_args(without_other_flags(arguments, print_line, parser))
        values = _values(given)
        if "model" not in values and (flag := flag_with_words(arguments, parser)) is not None:
            raise ConfigError(f"no model is given: {flag} takes all words after it; give the model first")
        return Parsed(_make(EngineConfig, values), _make(ServerOptions, values))
    except ConfigError as error:
        parser.error(str(error))


def _auto_settings(parsed: Parsed, given: argparse.Namespace) -> AutoSettings:
    """From a checkpoint, without what flags and the file set."""
    fields = [field.name for field in _all_fields()]
    names = {name for name in fields if hasattr(given, name)}
    if given.config is not None:
        names |= set(read_settings(given.config, (EngineConfig, ServerOptions), lambda line: None))
    from headrace.bench.slo import EXAMPLE

    return find_auto_settings(
        parsed.config.model,
        "serve",
        revision=parsed.config.revision,
        given=names,
        known=fields,
        where=directories(given.checkpoints),
        print_line=print_line,
        tune_arguments=["--slo", EXAMPLE],
    )


def _with(parsed: Parsed, settings: Mapping[str, Any]) -> Parsed:
    owners = [{field.name for field in dataclasses.fields(owner)} for owner in (EngineConfig, ServerOptions)]
    parts = [{name: value for name, value in settings.items() if name in names} for names in owners]
    return Parsed(dataclasses.replace(parsed.config, **parts[0]), dataclasses.replace(parsed.options, **parts[1]))


def _writes_checkpoint(path: Path, config: EngineConfig, arguments: Sequence[str]) -> OnReady:
    """What to do when the engine is ready. A checkpoint that cannot be written does not stop the server."""

    async def on_ready(server: Server) -> None:
        from headrace.checkpoint.document import write_checkpoint
        from headrace.checkpoint.self_check import self_check
        from headrace.server.endpoints.server_info import KEYS, shown_settings

        settings = shown_settings(server.services, hidden=KEYS)
        command = shlex.join(["headrace", "serve", *arguments])
        try:
            facts = await self_check(server.services.engine, config.model, settings, command=command)
            checkpoint = write_checkpoint(facts, path)
        except HeadraceError as error:
            print_line(f"warning: no checkpoint was written: {error}")
            return
        print_line(f"checkpoint: {path}: {checkpoint.at('decision', 'text')}")
        for warning in checkpoint.facts["warnings"]:
            print_line(f"warning: {warning}")

    return on_ready


def option_groups() -> list[tuple[str, str, list[dataclasses.Field[Any]]]]:
    groups: list[tuple[str, str, list[dataclasses.Field[Any]]]] = []
    for field in dataclasses.fields(ServerOptions):
        if field.name in GROUPS:
            groups.append((*GROUPS[field.name], []))
        groups[-1][2].append(field)
    return groups


def _values(given: argparse.Namespace) -> dict[str, Any]:
    owners = (EngineConfig, ServerOptions)
    values = {} if given.config is None else read_settings(given.config, owners, print_line)
    values |= {field.name: getattr(given, field.name) for field in _all_fields() if hasattr(given, field.name)}
    if given.positional_model is not None:
        if getattr(given, "model", given.positional_model) != given.positional_model:
            raise ConfigError(f"two models are given, {given.positional_model!r} and --model {given.model!r}; give one")
        values["model"] = given.positional_model
    if getattr(given, "api_key", None) is not None:
        print_line(
            "warning: --api-key is visible to other users of this machine; use HEADRACE_API_KEY or --api-key-file"
        )
    return values


def _all_fields() -> list[dataclasses.Field[Any]]:
    return [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerOptions)]


def _make(owner: type[Any], values: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(owner)}
    return owner(**{name: value for name, value in values.items() if name in names})
