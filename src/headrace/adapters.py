"""The settings of LoRA adapters: which ones are loaded, how many at once, and up to which rank. Names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from headrace.errors import ConfigError

DEFAULT_MAX_RANK = 16
MAX_RANK = 512
DEFAULT_MAX_LORAS = 4  # or as many as are given at the start, if those are more
MAX_LORAS = 1024
_KEYS = frozenset({"name", "path", "base_model_name"})
_FORMS = 'name=path, {"name": ..., "path": ...}, or a mapping from names to paths'

Modules = Mapping[str, Any] | str | Iterable[Any]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter for the prompts of a call: its name, a number of the caller's, and the directory of its files. The
    fields are vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        check_name(self.lora_name, "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ConfigError(f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}")
        if not isinstance(self.lora_path, (str, PathLike)) or not fspath(self.lora_path):
            raise ConfigError(f"lora_path must be the directory of an adapter, got {self.lora_path!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """What the tables of an engine have room for."""

    max_loras: int  # adapters on the device at once
    max_rank: int


def check_adapter_names(names: Iterable[str], model_names: Iterable[str]) -> None:
    for taken in set(names).intersection(model_names):
        raise ConfigError(f"lora_modules: {taken!r} is the name of the model; choose another one for the adapter")


def adapter_paths(given: Modules | None) -> dict[str, str]:
    """The directory of each adapter by name, from `lora_modules` in any of its forms."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not _KEYS.issuperset(given):
        pairs = [(name, path) for name, path in given.items()]
    else:
        words = [given] if isinstance(given, (str, Mapping)) else given
        pairs = [_pair(word) for word in words]
    paths: dict[str, str] = {}
    for name, path in pairs:
        check_name(name, "the name of an adapter in lora_modules")
        if not isinstance(path, (str, PathLike)) or not fspath(path):
            raise ConfigError(f"lora_modules: the path of adapter {name!r} must be a directory, got {path!r}")
        if name in paths:
            raise ConfigError(f"lora_modules names the adapter {name!r} twice; give each one a name of its own")
        paths[name] = str(fspath(path))
    return paths


def check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} must be non-empty text, got {name!r}")


def _pair(word: Any) -> tuple[Any, Any]:
    if isinstance(word, str) and not word.lstrip().startswith("{"):
        name, separator, path = word.partition("=")
        if not separator:
            raise ConfigError(f"lora_modules takes {_FORMS}; got {word!r}")
        return name, path
    fields = _object(word) if isinstance(word, str) else word
    if not isinstance(fields, Mapping) or not {"name", "path"} <= set(fields) <= _KEYS:
        raise ConfigError(f"lora_modules takes {_FORMS}; got {word!r}")
    return fields["name"], fields["path"]


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"lora_modules takes {_FORMS}; {text!r} is not JSON: {error}") from None
