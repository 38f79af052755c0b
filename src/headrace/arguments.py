"""Refuses misspelt keyword arguments and names the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from headrace.errors import HeadraceError, nearest

P = ParamSpec("P")
R = TypeVar("R")


def checks_arguments(
    error: Callable[[str], HeadraceError], *, name: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: an unknown keyword argument raises `error` with the nearest known name, or with all names."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        shown = name or function.__name__ + "()"
        known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in known:
                    raise error(unknown_argument(shown, given, known))
            return function(*args, **kwargs)

        return checked

    return decorate


def unknown_argument(owner: str, given: str, known: Sequence[str]) -> str:
    hint = nearest(given, known) or f"; it takes {', '.join(known)}"
    return f"{owner} has no argument {given!r}{hint}"
