"""Refuses misspelt keyword arguments and names the one that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from headrace.errors import HeadraceError, nearest

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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


def refuses_unknown(
    error: Callable[[str], HeadraceError], *, explain: Callable[[str], str | None] = lambda name: None
) -> Callable[[type[T]], type[T]]:
    """Class decorator: an unknown keyword argument raises `error` with an explanation or the nearest known name."""

    def decorate(cls: type[T]) -> type[T]:
        known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
        original = cls.__init__

        @functools.wraps(original)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    if (why := explain(name)) is not None:
                        raise error(f"{cls.__name__} has no argument {name!r}: {why}")
                    raise error(unknown_argument(cls.__name__, name, known))
            original(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def unknown_argument(owner: str, given: str, known: Sequence[str]) -> str:
    hint = nearest(given, known) or f"; it takes {', '.join(known)}"
    return f"{owner} has no argument {given!r}{hint}"
