"""Argument values that a model writes as bare text or as Python literals, as JSON."""

from __future__ import annotations

import ast
import json

_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MAX_VALUE_LEN = 1 << 20  # characters of a literal that is parsed


def text_as_json(text: str, types: tuple[str, ...]) -> str:
    """Returns the JSON of a value that stands between tags: what its types allow, and text if nothing else fits."""
    if types == ("string",):
        return dumped(text)
    literal = literal_as_json(text.strip())
    if literal is None or (types and not _is_one_of(literal, types)):
        return dumped(text)
    return literal


def literal_as_json(text: str) -> str | None:
    """Returns the JSON of a literal in the notation of JSON or Python; None if it is neither."""
    if text in _LITERALS:
        return _LITERALS[text]
    if not text or len(text) > _MAX_VALUE_LEN:
        return None
    try:
        json.loads(text, parse_constant=_refuse)
        text.encode()
        return text
    except (ValueError, RecursionError):
        return _python_as_json(text)


def _python_as_json(text: str) -> str | None:
    try:
        value = eval_literal(ast.parse(text, mode="eval").body)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError):
        return None
    return found


def eval_literal(node: ast.expr) -> object:
    """Returns the value of a literal. Names are those of JSON's literals; dictionaries have text as keys."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _LITERALS:
            return json.loads(_LITERALS[name])
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [eval_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): eval_literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is not text")


def _is_one_of(literal: str, types: tuple[str, ...]) -> bool:
    value = json.loads(literal)
    found = "null" if value is None else _TYPE_OF[type(value)]
    if found == "number" and value.is_integer() and "integer" in types:
        return True
    return found in types or (found == "integer" and "number" in types)


def dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
