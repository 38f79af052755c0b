"""Settings from a TOML file: the keys are the flags, with dashes or underscores and without the leading ones."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from headrace.cli.removed_flags import OTHER_FLAGS, judge
from headrace.errors import ConfigError, nearest

LISTS = ("preferred_batch_size", "allowed_origins")  # may be lists in TOML; with commas on the command line


def read_settings(path: str, owners: tuple[type[Any], ...], tell: Callable[[str], None]) -> dict[str, Any]:
    """The file's values by field name."""
    hints = {name: hint for owner in owners for name, hint in get_type_hints(owner).items()}
    settings: dict[str, Any] = {}
    for key, value in _parse(path).items():
        name, flag = key.replace("-", "_"), "--" + key.replace("_", "-")
        if name in settings:
            raise ConfigError(f"{path}: {name} is set twice")
        if name in hints:
            settings[name] = _checked(path, name, value, hints[name])
        elif flag in OTHER_FLAGS:
            judge(flag, OTHER_FLAGS[flag], str(value), tell)
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
    """Values of the right type; which of them are possible, the settings themselves check."""
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
