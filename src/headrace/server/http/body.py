"""From a body to a request: JSON, names and types. Nothing that matters is ignored, and what is wrong is named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from headrace.errors import nearest
from headrace.server.endpoints.schema.fields import LABELS, REASONS, UNSUPPORTED
from headrace.server.http.errors import ApiError, bad_request, not_supported

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "text",
}
_decoder = msgspec.json.Decoder()


def read(kind: type[T], body: bytes, *, unsupported: Mapping[str, tuple[Any, ...]] | None = None) -> T:
    """`unsupported`: names refused here beside those that are refused everywhere."""
    given = decode(body)
    names = kind.__struct_fields__
    refused = UNSUPPORTED if unsupported is None else {**UNSUPPORTED, **unsupported}
    if not given.keys() <= set(names):
        given = _without_other_names(given, names, refused)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except RecursionError:
        raise _too_deep() from None


def decode(body: bytes) -> dict[str, Any]:
    try:
        given = _decoder.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    return given


def _without_other_names(
    given: dict[str, Any], names: tuple[str, ...], refused: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The request without what has no effect. What would have one, or is unknown, is refused."""
    for name, value in given.items():
        if name in names or name in LABELS or value is None:
            continue
        if name in refused:
            _refuse_unless_neutral(name, value, refused[name])
        else:
            hint = nearest(name, [*names, *refused, *LABELS])
            raise ApiError(400, f"unknown parameter {name!r}{hint}", param=name, code="unknown_parameter")
    return {name: value for name, value in given.items() if name in names}


def _refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    reason = f" ({REASONS[name]})" if name in REASONS else ""
    way_out = f"leave it out or set it to {_json(neutral[0])}" if neutral else "leave it out"
    raise not_supported(name, f"{name} is not supported{reason}; {way_out}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _wrong_type(error: msgspec.ValidationError) -> ApiError:
    """msgspec's words, with the place as a client writes it and the types as JSON calls them."""
    text = str(error)
    found = _PATH.search(text)
    param = found.group(1) if found is not None else None
    problem = text[: found.start()] if found is not None else text
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return bad_request(f"{param} is missing", param, code="missing_parameter")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", problem, re.DOTALL):
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return bad_request(f"unknown parameter {param!r}", param, code="unknown_parameter")
    if types := re.fullmatch(r"Expected `(.+)`, got `(.+)`", problem):
        problem = f"must be {_kinds(types.group(1))}, got {_kinds(types.group(2))}"
    return bad_request(f"{param or 'the body'} {problem}", param, code="invalid_type")


def _kinds(types: str) -> str:
    names = [_KINDS.get(name, name) for name in types.split(" | ")]
    return " or ".join(name for name in names if name != "null") or "null"


def _too_deep() -> ApiError:
    return bad_request("the body is nested too deeply to be read", code="invalid_json")
