"""Options made from the fields of a dataclass of settings: names with dashes, help and choices from there."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.cli.parser import CommandParser
from headrace.config import EngineConfig
from headrace.errors import ConfigError


def add_engine_flags(parser: CommandParser, aliases: Mapping[str, Sequence[str]] | None = None) -> None:
    group = parser.add_argument_group("engine", "what is not set is chosen from the model and the machine")
    add_field_flags(group, EngineConfig, dataclasses.fields(EngineConfig), aliases)


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
            default=argparse.SUPPRESS,  # so that only what was given reaches the config
            help=_help(field),
            **_kind_of(hints[field.name]),
        )


def engine_config(parser: CommandParser, given: argparse.Namespace) -> EngineConfig:
    """The config of a command line; what the config refuses is wrong usage."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    try:
        return EngineConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})
    except ConfigError as error:
        parser.error(str(error))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind_of(hint: Any) -> dict[str, Any]:
    """argparse's own words for a field's type: bool, a literal or a scalar; the latter two may be None."""
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
