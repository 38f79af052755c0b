"""What a series is: stated once under Headrace's own name, shown under others too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

BASE_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for the same numbers. A counter's name is without `_total`, which its samples have."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)  # our label -> its own; others keep their names
    values: Mapping[str, str] | None = None  # our label value -> its own; samples with others are left out
    base_labels: tuple[str, ...] = BASE_LABELS
    bounds: tuple[float, ...] | None = None  # a histogram's, where they are fewer than ours
    constant: float | None = None  # always this: what it counts does not exist here


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One thing that is measured. Its samples have the base labels and `labels`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] | None = None  # a histogram's; None: 1, 2, 5, 10 ... up to the context's length
    aliases: tuple[Alias, ...] = ()
    alert: str = ""  # what guides alert on

    @property
    def as_alias(self) -> Alias:
        """Its own name, in the same form as the others."""
        return Alias(self.name)


def token_bounds(max_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to `max_len`."""
    bounds: list[float] = []
    decade = 1
    while True:
        for digit in (1, 2, 5):
            if digit * decade > max_len:
                return tuple(bounds)
            bounds.append(digit * decade)
        decade *= 10
