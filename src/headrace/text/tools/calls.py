"""One tool call as far as it has arrived: what each notation of calls offers, and the types of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.text.tools.json_scanner import Found

ParameterTypes = Mapping[str, tuple[str, ...]]  # the JSON types that each parameter may have; none if it says nothing

_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
_MAX_DEPTH = 8  # of references within a schema


class Call(Protocol):
    name: str | None
    id: str | None
    arguments: str  # JSON, as far as it has arrived

    @property
    def text(self) -> str:
        """The text that was fed, except a character that was an error."""
        ...

    def feed(self, char: str) -> Found:
        """Takes one character. ERROR: the text so far, without this character, is not a call. OBJECT_END: the call is
        complete."""
        ...

    @property
    def can_be_announced(self) -> bool:
        """Whether its name is known and its arguments have started."""
        ...

    @property
    def text_after_arguments(self) -> str: ...


def parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the types of each parameter that the schema of a tool's arguments names."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): tuple(sorted(_types(value, schema, 0))) for name, value in properties.items()}


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    if "$ref" in schema:
        return _types(_referred(schema["$ref"], root), root, depth + 1)
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {str(name) for name in given}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {_TYPE_OF.get(type(value), "object") for value in values}
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    return {name for part in parts for name in _types(part, root, depth + 1)}


def _referred(reference: object, root: Mapping[str, Any]) -> object:
    found: object = root
    for key in str(reference).removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
