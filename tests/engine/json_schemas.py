"""JSON schemas whose values have bounded length, and a small independent validator."""

from __future__ import annotations

import datetime
import ipaddress
import math
import re
import uuid
from typing import Any

WORD: dict[str, Any] = {"type": "string", "maxLength": 4}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """Build an object schema with these properties, all required unless given otherwise."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "const text": {"const": 'a "quoted" \\ text'},
    "const object": {"const": {"a": [1, None, True], "b": "é"}},
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of kinds": {"enum": ["one", 2, 3.5, None, False]},
    "short text": {"type": "string", "maxLength": 5},
    "text between": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}[0-9]{1,3}$"},
    "pattern with choices": {"type": "string", "pattern": "^(cat|dog)-(small|large)$"},
    "integer between": {"type": "integer", "minimum": 3, "maximum": 17},
    "negative integer": {"type": "integer", "minimum": -120, "maximum": -7},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array of booleans": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    "array between": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"const": "x"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "array of arrays": {
        "type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2},
        "minItems": 1, "maxItems": 2,
    },
    "empty object": record(),
    "record": record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, ok={"type": "boolean"}),
    "optional properties": record([], a={"type": "boolean"}, b={"type": "null"}, c={"enum": [1]}),
    "some required": record(["b"], a={"type": "boolean"}, b={"type": "boolean"}, c={"type": "boolean"}),
    "nested": record(outer=record(middle=record(inner={"enum": ["deep"]})), other={"type": "boolean"}),
    "array of records": {"type": "array", "items": record(k=WORD), "minItems": 1, "maxItems": 2},
    "names with signs": record(**{"a b": {"type": "null"}, 'quo"te': {"type": "null"}, "ключ": {"type": "null"}}),
    "any of": {"anyOf": [{"type": "boolean"}, record(why={"enum": ["no", "yes"]})]},
    "one of": {"anyOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]},
    "types": {"type": ["boolean", "null"]},
    "references": {
        "$defs": {"colour": {"enum": ["red", "blue"]}},
        **record(front={"$ref": "#/$defs/colour"}, back={"$ref": "#/$defs/colour"}),
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "nullable": record(value={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
}  # fmt: skip

_KINDS: dict[str, Any] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_FORMATS: dict[str, Any] = {"date": datetime.date.fromisoformat, "uuid": uuid.UUID, "ipv4": ipaddress.IPv4Address}


def fits(value: Any, schema: dict[str, Any] | bool, root: dict[str, Any] | None = None) -> bool:
    """Validate a value against a schema, for the keywords that are used here."""
    if isinstance(schema, bool):
        return schema
    root = root or schema
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    kinds = schema.get("type", list(_KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return (
        any(_KINDS[kind](value) for kind in kinds)
        and ("const" not in schema or _same(value, schema["const"]))
        and ("enum" not in schema or any(_same(value, each) for each in schema["enum"]))
        and ("anyOf" not in schema or any(fits(value, each, root) for each in schema["anyOf"]))
        and all(fits(value, each, root) for each in schema.get("allOf", ()))
        and (not isinstance(value, str) or _fits_text(value, schema))
        and (not _KINDS["number"](value) or _fits_number(value, schema))
        and (not isinstance(value, list) or _fits_list(value, schema, root))
        and (not isinstance(value, dict) or _fits_object(value, schema, root))
    )


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _fits_text(value: str, schema: dict[str, Any]) -> bool:
    if "format" in schema:
        _FORMATS[schema["format"]](value)
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf) and (
        "pattern" not in schema or re.search(schema["pattern"], value) is not None
    )


def _fits_number(value: float, schema: dict[str, Any]) -> bool:
    return (
        schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
        and value % schema.get("multipleOf", 1) == 0
    )


def _fits_list(value: list[Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    first = schema.get("prefixItems", [])
    schemas = [*first, *[schema.get("items", True)] * (len(value) - len(first))]
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf) and all(
        fits(item, each, root) for item, each in zip(value, schemas, strict=False)
    )


def _fits_object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return set(schema.get("required", ())) <= value.keys() and all(
        fits(item, known.get(name, others), root) for name, item in value.items()
    )
