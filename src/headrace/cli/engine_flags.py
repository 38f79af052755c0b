"""Flags generated from the fields of a settings dataclass: name, help, type and choices."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.cli.parser import CommandParser
from headrace.config import EngineConfig
from headrace.errors import ConfigError

SHORT_FLAGS: dict[str, Sequence[str]] = {  # as vLLM has them
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
}


def add_engine_flags(parser: CommandParser, aliases: Mapping[str, Sequence[str]] | None = None) -> None:
    group = parser.add_argument_group("engine", "values that are not set are chosen for the model and the machine")
    add_field_flags(group, EngineConfig, dataclasses.fields(EngineConfig), SHORT_FLAGS | dict(aliases or {}))


def add_field_flags(
    group: argparse._ArgumentGroup,
    owner: type[Any],
    fields: Sequence[dataclasses.Field[Any]],
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> None:
    hints = get_type_hints(owner)
    for field in fields:
        group.add_argument(
            flag_of(field.name),
            *(aliases or {}).get(field.name, ()),
            dest=field.name,
            default=argparse.SUPPRESS,  # only given flags reach the config
            help=_help(field),
            **_kind_of(hints[field.name]),
        )


def engine_config(parser: CommandParser, given: argparse.Namespace) -> EngineConfig:
    """Build the config of a command line. An invalid value is a usage error."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    try:
        return EngineConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})
    except ConfigError as error:
        parser.error(str(error))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind_of(hint: Any) -> dict[str, Any]:
    """Return argparse's options for a field's type: bool, or a literal or scalar that may be None."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    is_optional = NoneType in get_args(hint)
    (scalar,) = [kind for kind in get_args(hint) if kind is not NoneType] if is_optional else (hint,)
    if get_origin(scalar) is Literal:
        return {"choices": get_args(scalar)}
    return {"type": scalar, "metavar": {int: "N", float: "X", str: "NAME"}[scalar]}


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if "default:" in text:
        return text
    if isinstance(field.default, bool):
        return f"{text} (default: {'on' if field.default else 'off'})"
    return f"{text} (default: {'automatic' if field.default in (None, 'auto') else field.default})"
