"""Objects of JSON schemas are closed where the schema leaves them open without saying so."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.text.closed_schemas import closed

TEXT = {"type": "string"}
A = {"type": "object", "properties": {"a": TEXT}}
B = {"type": "object", "properties": {"b": TEXT}}


def shut(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, shut(A)),
        ({"properties": {}}, shut({"properties": {}})),
        ({"properties": {"a": A}}, shut({"properties": {"a": shut(A)}})),
        ({"type": "array", "items": A}, {"type": "array", "items": shut(A)}),
        ({"anyOf": [A, B]}, {"anyOf": [shut(A), shut(B)]}),
        ({"allOf": [A]}, {"allOf": [shut(A)]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": shut(A)}}),
        ({"additionalProperties": A}, {"additionalProperties": shut(A)}),
        ({"patternProperties": {"^x": A}, "required": ["xy"]},
         shut({"patternProperties": {"^x": shut(A)}, "required": ["xy"]})),
    ],
)  # fmt: skip
def test_an_object_that_lists_its_properties_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": TEXT},
        {**A, "unevaluatedProperties": True},
        {**A, "required": ["other"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {**B, "$ref": "#/$defs/more~1A", "$defs": {"more/A": {"$ref": "#/$defs/A"}, "A": A}},
        {"enum": [{"properties": {}}], "default": {"properties": {}}, "const": {"properties": {}}},
        {"properties": 5},
        {"properties": {}, "required": "a"},
    ],
)
def test_what_says_otherwise_or_is_one_of_several_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_what_is_below_several_schemas_is_closed() -> None:
    schema = {"allOf": [{"properties": {"a": A}}, B]}
    assert closed(schema) == {"allOf": [{"properties": {"a": shut(A)}}, B]}


def test_the_given_schema_is_not_changed() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"properties": {}}}}
    closed(schema)
    assert schema == {"properties": {"a": {"properties": {}}}}
