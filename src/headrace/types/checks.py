"""Checks of values that a request brings. A refusal names the parameter, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import RequestError

MAX_INT32 = 2**31 - 1  # of parameters that become int32 values on the device


def refusal(param: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{param} must be {rule}, got {value!r}", param=param)


def check_flag(param: str, value: object) -> None:
    """Refuse what is not a boolean: the text "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise refusal(param, value, "True or False")


def check_integer(param: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise refusal(param, value, "an integer")
    if value < low or (high is not None and value > high):
        raise refusal(param, value, f"at least {low}" if high is None else f"between {low} and {high}")


def check_number(param: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not math.isfinite(value):
        raise refusal(param, value, "a finite number")
    if not low <= value <= high:
        raise refusal(param, value, f"between {low:g} and {high:g}")


def checked_list(param: str, given: object) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise refusal(param, given, "a list")
    return tuple(given)


def checked_token_ids(param: str, given: object) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, (Sequence, set, frozenset, np.ndarray)) or not len(given):
        raise refusal(param, given, "a list of at least one token id")
    for token in given:
        check_integer(param, token, low=0, high=MAX_INT32)
    return tuple(int(token) for token in given)
