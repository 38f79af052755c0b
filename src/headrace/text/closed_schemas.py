"""Closes the objects of a JSON schema: an object has the properties that are listed and no others.

JSON Schema leaves an object open if it does not say otherwise, and models then invent keys until `max_tokens`. vLLM's
default grammars close objects too. An object stays open if its schema has `additionalProperties` or
`unevaluatedProperties`, if it lists no properties, or if several schemas apply to it (`allOf`, or `$ref` beside
`properties`): each would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_LISTING = ("properties", "patternProperties")
_ANSWERED = ("additionalProperties", "unevaluatedProperties")
_SAME_OBJECT = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema whose objects are closed."""
    parts: set[str] = set()  # schemas that are referred to as one of several for the same object
    while True:
        walk = _Walk(frozenset(parts))
        result: dict[str, Any] = walk.closed(schema, "#", is_part=False)
        if walk.references <= parts:
            return result
        parts |= walk.references


class _Walk:
    """One pass over a schema. `references` are the schemas that it found to be parts."""

    def __init__(self, parts: frozenset[str]) -> None:
        self._parts = parts
        self.references: set[str] = set()

    def closed(self, schema: Any, place: str, *, is_part: bool) -> Any:
        """`place`: as in a `$ref`. `is_part`: other schemas apply to the same object."""
        if not isinstance(schema, Mapping):
            return schema
        is_part = is_part or place in self._parts or _has_several(schema)
        if is_part and isinstance(schema.get("$ref"), str):
            self.references.add(unquote(schema["$ref"]))
        copy = dict(schema)
        for keyword, value in schema.items():
            copy[keyword] = self._closed_within(keyword, value, f"{place}/{keyword}", is_part=is_part)
        if not is_part and _is_left_open(schema):
            copy["additionalProperties"] = False
        return copy

    def _closed_within(self, keyword: str, value: Any, place: str, *, is_part: bool) -> Any:
        """The schemas of one keyword. Those of `not` and `if` stay as they are."""
        if keyword in _NAMED and isinstance(value, Mapping):
            return {
                key: self.closed(child, f"{place}/{_escaped(str(key))}", is_part=False) for key, child in value.items()
            }
        if keyword in _LISTED and isinstance(value, list):
            is_part = is_part and keyword in _SAME_OBJECT
            return [self.closed(child, f"{place}/{index}", is_part=is_part) for index, child in enumerate(value)]
        return self.closed(value, place, is_part=False) if keyword in _SINGLE else value


def _has_several(schema: Mapping[str, Any]) -> bool:
    """Whether more than one schema here applies to the same object."""
    num_others = sum(keyword in schema for keyword in _SAME_OBJECT)
    if not num_others:
        return False
    members = schema.get("allOf")
    return (
        num_others > 1 or any(name in schema for name in _LISTING) or (isinstance(members, list) and len(members) > 1)
    )


def _is_left_open(schema: Mapping[str, Any]) -> bool:
    """Whether it lists properties, does not say whether there may be others, and needs no others."""
    if not any(name in schema for name in _LISTING) or any(name in schema for name in _ANSWERED):
        return False
    listed, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list):
        return False  # not a valid schema, which the compiler says better
    if "patternProperties" in schema:
        return True
    min_properties = schema.get("minProperties", 0)
    needs_more = isinstance(min_properties, int) and min_properties > len(listed)
    return not needs_more and all(name in listed for name in required)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
