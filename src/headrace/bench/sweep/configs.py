"""The list of settings to sweep, as guides write it.

    [{"name": "chunked-8k", "enable_chunked_prefill": true, "max_num_batched_tokens": 8192},
     {"enable_chunked_prefill": false, "max_num_seqs": 0}]        or    {"chunked-8k": {...}, ...}

Values are kept as given, false and 0 too: a value that the engine refuses becomes a failed row. Names are checked
before anything starts.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, nearest

HASH_LEN = 16


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """One entry of the list. `copy` counts equal entries: the same settings twice show the machine's noise."""

    name: str
    settings: Mapping[str, Any]
    copy: int = 0

    @property
    def hash(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return sha256(text.encode()).hexdigest()[:HASH_LEN] + (f"-{self.copy}" if self.copy else "")


def read_configs(path: Path, **options: Any) -> list[SweepConfig]:
    """The configs of a JSON file; options as for `parse_configs`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_configs(text, str(path), **options)


def parse_configs(
    text: str,
    source: str,
    *,
    known: Collection[str] | None = None,
    is_product: bool = False,
    list_settings: Collection[str] = (),
    explain: Callable[[str], str | None] = lambda name: None,
) -> list[SweepConfig]:
    """Parse and check. `known` are the engine's setting names (None: anything goes), `list_settings` those whose value
    may be a list, and `explain` says why a name that others know is not one of them."""
    entries = _entries(_parsed(text, source), source)
    errors: list[str] = []
    configs: list[SweepConfig] = []
    for place, (name, given) in enumerate(entries, 1):
        label = f"config {place}" + (f" ({name})" if name else "")
        settings, found = _settings(given, known, explain)
        lists = [key for key, value in settings.items() if isinstance(value, list) and key not in list_settings]
        if lists and not is_product:
            found += [f"{key} is a list; --product runs one config for each of its values" for key in lists]
        if any(settings[key] == [] for key in lists):
            found.append(f"{', '.join(key for key in lists if settings[key] == [])}: an empty list has no value")
        errors += [f"{label}: {error}" for error in found]
        if not found:
            configs += _expanded(name, settings, lists)
    if errors:
        raise ConfigError(f"{source} has {len(errors)} error{'s' * (len(errors) > 1)}:\n  " + "\n  ".join(errors))
    return _with_own_names(configs)


def shown_settings(settings: Mapping[str, Any]) -> str:
    """`max_num_seqs=0, enable_chunked_prefill=false`."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items()) or "defaults"


def _parsed(text: str, source: str) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if repeated:
            raise ConfigError(f"{source}: {repeated[0]!r} is there twice in one object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None


def _entries(parsed: Any, source: str) -> list[tuple[str, dict[str, Any]]]:
    """Name (or an empty one) and settings of each entry."""
    shape = f"{source} must be a list of settings, or an object of names and settings"
    if isinstance(parsed, dict):
        entries = list(parsed.items())
    elif isinstance(parsed, list):
        entries = [("", each) for each in parsed]
    else:
        raise ConfigError(f"{shape}; it is {type(parsed).__name__}")
    if not entries:
        raise ConfigError(f"{source} has no configs")
    named = []
    for place, (name, given) in enumerate(entries, 1):
        if not isinstance(given, dict):
            raise ConfigError(f"{shape}; entry {place} is {json.dumps(given)[:60]}")
        own = given.get("name", name)
        if not isinstance(own, str):
            raise ConfigError(f"{source}: the name of config {place} must be text, got {json.dumps(own)[:60]}")
        named.append((own, {key: value for key, value in given.items() if key != "name"}))
    return named


def _settings(
    given: Mapping[str, Any], known: Collection[str] | None, explain: Callable[[str], str | None]
) -> tuple[dict[str, Any], list[str]]:
    """Settings under their names with underscores, and what is wrong with them."""
    settings: dict[str, Any] = {}
    errors = []
    for key, value in given.items():
        name = key.removeprefix("--").replace("-", "_")
        if name in settings:
            errors.append(f"{name} is set twice")
        elif known is not None and name not in known:
            reason = explain(name)
            errors.append(f"unknown setting {key!r}" + (f": {reason}" if reason else nearest(name, known)))
        settings[name] = value
    return settings, errors


def _expanded(name: str, settings: Mapping[str, Any], lists: list[str]) -> Iterator[SweepConfig]:
    """One config for each combination of the values in lists."""
    for values in itertools.product(*(settings[key] for key in lists)):
        chosen = dict(zip(lists, values, strict=True))
        full = {**settings, **chosen}
        suffix = f", {shown_settings(chosen)}" if chosen else ""
        yield SweepConfig(f"{name}{suffix}" if name else shown_settings(full), full)


def _with_own_names(configs: list[SweepConfig]) -> list[SweepConfig]:
    names: Counter[str] = Counter()
    hashes: Counter[str] = Counter()
    result = []
    for config in configs:
        names[config.name] += 1
        name = config.name if names[config.name] == 1 else f"{config.name} ({names[config.name]})"
        result.append(replace(config, name=name, copy=hashes[config.hash]))
        hashes[config.hash] += 1
    return result
