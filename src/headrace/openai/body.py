"""Reads a JSON body into a request struct: names and types. A parameter that would be ignored is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from headrace.errors import RequestError, nearest
from headrace.openai.errors import INVALID_TYPE, MISSING, UNKNOWN, bad_request
from headrace.openai.fields import HINTS, LABELS, REASONS, UNSUPPORTED, note_ignored, refusal

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


def read(
    kind: type[T],
    body: bytes,
    *,
    unsupported: Mapping[str, tuple[Any, ...]] | None = None,
    hints: frozenset[str] = frozenset(),
) -> T:
    """The body of an HTTP request. `unsupported` and `hints`: names that are refused or ignored here, beside those
    everywhere."""
    return convert(kind, decode(body), unsupported=unsupported, hints=hints)


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


def convert(
    kind: type[T],
    given: dict[str, Any],
    *,
    unsupported: Mapping[str, tuple[Any, ...]] | None = None,
    hints: frozenset[str] = frozenset(),
) -> T:
    """The same for a body that is decoded: the body of a batch line."""
    names = kind.__struct_fields__
    if not given.keys() <= set(names):
        given = _without_other_names(given, names, {**UNSUPPORTED, **(unsupported or {})}, HINTS | hints)
    integers = _integer_fields(kind)
    for name, value in given.items():
        if type(value) is float and name in integers and value.is_integer():
            given = {**given, name: int(value)}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except RecursionError:
        raise _too_deep() from None


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Fields that also take 2.0: clients of languages without integers write it."""
    return frozenset(name for name, hint in get_type_hints(kind).items() if hint == int | None)


def _without_other_names(
    given: dict[str, Any],
    names: tuple[str, ...],
    refused: Mapping[str, tuple[Any, ...]],
    hints: frozenset[str],
) -> dict[str, Any]:
    """The body without parameters that have no effect. Refuses those that would have one, and unknown ones."""
    for name, value in given.items():
        if name in names or name in LABELS or value is None:
            continue
        if name in hints:
            note_ignored(name)
            continue
        if name not in refused:
            hint = nearest(name, [*names, *refused, *LABELS, *hints])
            raise bad_request(f"unknown parameter {name!r}{hint}", name, UNKNOWN)
        if (error := refusal(name, value, refused[name], REASONS)) is not None:
            raise error
    return {name: value for name, value in given.items() if name in names}


def _wrong_type(error: msgspec.ValidationError) -> RequestError:
    """msgspec's error with the parameter's path as clients write it, and the types as JSON names them."""
    text = str(error)
    found = _PATH.search(text)
    param = found.group(1) if found is not None else None
    problem = text[: found.start()] if found is not None else text
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return bad_request(f"{param} is missing", param, code=MISSING)
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", problem, re.DOTALL):
        param = f"{param}.{unknown.group(1)}" if param else unknown.group(1)
        return bad_request(f"unknown parameter {param!r}", param, code=UNKNOWN)
    if types := re.fullmatch(r"Expected `(.+)`, got `(.+)`", problem):
        problem = f"must be {_kinds(types.group(1))}, got {_kinds(types.group(2))}"
    return bad_request(f"{param or 'the body'} {problem}", param, code=INVALID_TYPE)


def _kinds(types: str) -> str:
    names = [_KINDS.get(name, name) for name in types.split(" | ")]
    return " or ".join(name for name in names if name != "null") or "null"


def _too_deep() -> RequestError:
    return bad_request("the body is nested too deeply to be read", code="invalid_json")
