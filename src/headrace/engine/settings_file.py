"""Reads settings from a TOML or YAML file, as `headrace tune` writes it and `--config` and `LLM(config=...)` take it.

Keys are the names of settings, with dashes or underscores. Imports no torch.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.errors import ConfigError, nearest
from headrace.other_settings import (
    OtherSetting,
    field_of_alias,
    find_other,
    own_value,
    take_argument,
    without_other_settings,
)

LISTS = ("preferred_batch_size", "allowed_origins")  # lists in TOML, comma-separated on the command line

TakeOther = Callable[[str, OtherSetting], None]  # a setting of another engine; raises a ConfigError to refuse it

_log = logging.getLogger(__name__)


def read_settings(path: str, owners: tuple[type[Any], ...], take_other: TakeOther) -> dict[str, Any]:
    """Return the file's values by field name. `owners` are the dataclasses that have the fields."""
    hints = {name: hint for owner in owners for name, hint in get_type_hints(owner).items()}
    settings: dict[str, Any] = {}
    for key, value in read_keys(path).items():
        name = key.replace("-", "_")
        name = name if name in hints else field_of_alias(name) or name
        if name in settings:
            raise ConfigError(f"{path}: {name} is set twice")
        if name in hints:
            settings[name] = _checked(path, name, own_value(name, value), hints[name])
        elif (found := find_other(name, value)) is not None:
            take_other(name, found)
        else:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(name, hints)}")
    return settings


def config_from(model: str | None, path: str | PathLike[str] | None, settings: Mapping[str, Any]) -> EngineConfig:
    """The config of keyword arguments and, if there is one, of a file. Arguments win over the file. Settings of other
    engines are logged or refused, as on the command line."""
    stored = {} if path is None else read_settings(fspath(path), (EngineConfig,), _take_other)
    given = own_settings(settings if model is None else {"model": model, **settings})
    return EngineConfig(**{"model": EMBEDDED_MODEL, **stored, **given})


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments without those of other engines, which are logged or refused."""
    return without_other_settings(settings, [field.name for field in fields(EngineConfig)], _log.warning)


def _take_other(name: str, found: OtherSetting) -> None:
    take_argument(name, found, _log.warning)


def read_keys(path: str) -> Mapping[str, Any]:
    """The keys and values of the file as they are."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _read_yaml(path, text) if path.endswith((".yaml", ".yml")) else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _read_yaml(path: str, text: str) -> Mapping[str, Any]:
    """As vLLM's files are: a key without a value is not set, and a dotted one is a key of an object, as in TOML."""
    import yaml  # type: ignore[import-untyped]

    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must have settings as keys, such as 'port: 8000'")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if value is not None:
            _set(settings, key.split("."), value, path)
    return settings


def _set(settings: dict[str, Any], keys: list[str], value: Any, path: str) -> None:
    """Sets a value, in objects of objects for several keys."""
    *parents, last = keys
    for parent in parents:
        settings = settings.setdefault(parent, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{path}: {parent} is set to {settings!r}, and {'.'.join(keys)} to {value!r}; keep one")
    settings[last] = value


def _checked(path: str, name: str, value: Any, hint: Any) -> Any:
    """Check the type of a value. The settings check its range."""
    if name in LISTS and isinstance(value, list):
        return ",".join(map(str, value))
    kinds = [kind for kind in (get_args(hint) if NoneType in get_args(hint) else (hint,)) if kind is not NoneType]
    if value is None and NoneType in get_args(hint):
        return None  # `max_model_len: auto`
    if len(kinds) > 1 and isinstance(value, list):
        return tuple(value)
    if get_origin(kinds[0]) is Mapping and isinstance(value, dict):
        return value
    kind = kinds[0] if get_origin(kinds[0]) is None else str
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{path}: {name} must be {_SHOWN[kind]}, got {value!r}")
    return value


_SHOWN = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
