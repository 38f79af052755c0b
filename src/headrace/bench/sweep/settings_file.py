"""Settings as a file that the engine reads: TOML for Headrace, YAML for vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def settings_file(engine: str, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Suffix and text. A setting without a value is left to the engine, and named in a comment."""
    automatic = "".join(f"# {name}: automatic\n" for name, value in settings.items() if value is None)
    given = {name: value for name, value in settings.items() if value is not None}
    if engine == "vllm":
        return ".yaml", automatic + "".join(_yaml_line(name.replace("_", "-"), value) for name, value in given.items())
    return ".toml", automatic + "".join(f"{name} = {_value(value)}\n" for name, value in given.items())


def _yaml_line(name: str, value: Any) -> str:
    # Older versions of vLLM drop a false switch of a file without a word; its opposite, set to true, is kept by all.
    if value is False:
        return f"no-{name}: true\n"
    return f"{name}: {_value(value)}\n"


def _value(value: Any) -> str:
    """JSON's texts, numbers, booleans and lists are valid in both formats."""
    return json.dumps(value)
