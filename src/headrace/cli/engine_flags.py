"""Flags generated from the fields of a settings dataclass: name, help, type and choices."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace.cli.parser import CommandParser
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.other_settings import READABLE_NUMBERS, own_value, read_number

SHORT_FLAGS: dict[str, Sequence[str]] = {  # as vLLM has them
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "quantization": ("-q",),
}

_METAVARS = {"api_key": "KEY", "chat_template": "FILE", "master_addr": "HOST"}


class _StoreWords(argparse.Action):
    """One word is stored as text, several as a tuple."""

    def __call__(
        self, parser: argparse.ArgumentParser, given: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(given, self.dest, values[0] if len(values) == 1 else tuple(values))


class _MergeObject(argparse.Action):
    """JSON objects are merged: vLLM's dotted flags give one key each."""

    def __call__(
        self, parser: argparse.ArgumentParser, given: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(given, self.dest, merged(getattr(given, self.dest, {}), values))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: merged(old[name], new[name]) for name in old if _is_object(old[name]) and _is_object(new.get(name))}
    return {**old, **new, **both}


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


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
            **_kind_of(field.name, hints[field.name]),
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


def json_flags(parser: CommandParser) -> frozenset[str]:
    """The flags whose values are JSON objects."""
    return frozenset(flag for flag, action in parser.actions.items() if isinstance(action, _MergeObject))


def list_flags(parser: CommandParser) -> frozenset[str]:
    """The flags that take several words."""
    return frozenset(flag for flag, action in parser.actions.items() if isinstance(action, _StoreWords))


def _kind_of(name: str, hint: Any) -> dict[str, Any]:
    """Return argparse's options for a field's type: bool, or a literal, scalar, object or words that may be None."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    is_optional = NoneType in get_args(hint)
    scalar, *others = [kind for kind in get_args(hint) if kind is not NoneType] if is_optional else (hint,)
    if others:
        return {"action": _StoreWords, "nargs": "+", "metavar": _METAVARS.get(name, "NAME")}
    if get_origin(scalar) is Mapping:
        return {"action": _MergeObject, "type": _read_object, "metavar": "JSON"}
    if get_origin(scalar) is Literal:
        return {"choices": get_args(scalar), "type": partial(own_value, name)}
    if name in READABLE_NUMBERS:
        return {"type": partial(_read_number, name), "metavar": "N"}
    return {"type": scalar, "metavar": _METAVARS.get(name, {int: "N", float: "X", str: "NAME"}[scalar])}


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _read_number(name: str, text: str) -> int | None:
    try:
        return read_number(name, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if "default:" in text:
        return text
    if isinstance(field.default, bool):
        return f"{text} (default: {'on' if field.default else 'off'})"
    return f"{text} (default: {'automatic' if field.default in (None, 'auto') else field.default})"
