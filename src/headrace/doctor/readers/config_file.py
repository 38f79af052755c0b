"""The settings in the file of `--config`: TOML for Headrace, YAML for vLLM. Keys are flag names without dashes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, reason_of


def read_config_file(path: Path, program: str) -> dict[str, str] | None:
    """Values by key, as they would be written on the command line; None if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error
    values = _toml(path, text) if program == "headrace" else _yaml(path, text)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds no keys and values")
    return {str(key): _written(value) for key, value in values.items() if value is not None}


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _yaml(path: Path, text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
