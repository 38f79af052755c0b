"""The form of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import RequestError, nearest
from headrace.openai.errors import bad_request
from headrace.openai.schema.common import SamplingFields
from headrace.types import StructuredOutputs

_PARAM = "response_format"
_TYPES = ("text", "json_object", "json_schema")
_FIELDS = {"json_object": ("schema",), "json_schema": ("json_schema",)}  # beside the type; the first as in llama.cpp
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def structured_outputs(request: SamplingFields) -> StructuredOutputs | None:
    """The constraint that a request gives in one of the two ways; None: any text."""
    of_format = read_response_format(request.response_format)
    if request.structured_outputs is None:
        return of_format
    if of_format is not None:
        raise bad_request("response_format and structured_outputs are both given; give one", "structured_outputs")
    return StructuredOutputs.of(request.structured_outputs)


def read_response_format(given: object) -> StructuredOutputs | None:
    """Returns None for text. A schema is always enforced, whether `strict` is set or not."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise _refused(f"must be an object with a type ({', '.join(_TYPES)}), got {_shown(given)}")
    kind = given["type"]
    if kind not in _TYPES:
        raise _refused(f"type must be {', '.join(_TYPES)}, got {_shown(kind)}{nearest(kind, _TYPES)}")
    _refuse_unknown(given, ("type", *_FIELDS.get(kind, ())), "")
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema") is None:
        return StructuredOutputs(json_object=True, asked_as=_PARAM)
    if kind == "json_object":
        return StructuredOutputs(json=_checked_schema(given["schema"], "schema"), asked_as=_PARAM)
    return StructuredOutputs(json=_schema(given.get("json_schema")), asked_as=_PARAM)


def _schema(described: object) -> Mapping[str, Any]:
    if not isinstance(described, Mapping):
        raise _refused("of type json_schema needs json_schema, an object with name and schema")
    _refuse_unknown(described, _SCHEMA_FIELDS, "json_schema.")
    if not isinstance(described.get("name", ""), str):
        raise _refused(f"json_schema.name must be text, got {_shown(described['name'])}")
    if not isinstance(described.get("strict"), bool | None):
        raise _refused(f"json_schema.strict must be true or false, got {_shown(described['strict'])}")
    schema = described.get("schema")
    if schema is None:  # optional in OpenAI's API
        return {"type": "object"}
    return _checked_schema(schema, "json_schema.schema")


def _checked_schema(schema: object, name: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping):
        raise _refused(f"{name} must be an object, got {_shown(schema)}")
    return schema


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in known:
            raise _refused(f"has an unknown field {f'{prefix}{name}'!r}{nearest(str(name), known)}")


def _refused(message: str) -> RequestError:
    return RequestError(f"{_PARAM} {message}", param=_PARAM)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
