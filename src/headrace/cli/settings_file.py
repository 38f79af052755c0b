"""Reads settings from a TOML file. Keys are flag names without the leading dashes, with dashes or underscores."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from headrace.cli.removed_flags import check_flag
from headrace.errors import ConfigError, nearest
from headrace.other_settings import OTHER_FLAGS

LISTS = ("preferred_batch_size", "allowed_origins")  # lists in TOML, comma-separated on the command line


def read_settings(path: str, owners: tuple[type[Any], ...], print_line: Callable[[str], None]) -> dict[str, Any]:
    """Return the file's values by field name."""
    hints = {name: hint for owner in owners for name, hint in get_type_hints(owner).items()}
    settings: dict[str, Any] = {}
    for key, value in _parse(path).items():
        name, flag = key.replace("-", "_"), "--" + key.replace("_", "-")
        if name in settings:
            raise ConfigError(f"{path}: {name} is set twice")
        if name in hints:
            settings[name] = _checked(path, name, value, hints[name])
        elif flag in OTHER_FLAGS:
            check_flag(flag, OTHER_FLAGS[flag], str(value), print_line)
        else:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, hints)}")
    return settings


def _parse(path: str) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _checked(path: str, name: str, value: Any, hint: Any) -> Any:
    """Check the type of a value. The settings check its range."""
    if name in LISTS and isinstance(value, list):
        return ",".join(map(str, value))
    kinds = [kind for kind in (get_args(hint) if NoneType in get_args(hint) else (hint,)) if kind is not NoneType]
    kind = kinds[0] if get_origin(kinds[0]) is None else str
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}: {name} must be {_SHOWN[kind]}, got {value!r}")
    return value


_SHOWN = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
