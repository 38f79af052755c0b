"""The type of a metric: declared once under its Headrace name, exported under its aliases too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Scope = Literal["engine", "server"]
OverEngines = Literal["sum", "min", "max"]

BASE_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for the same values. A counter's name has no `_total`; its samples have."""

    name: str
    labels: Mapping[str, str] = field(
        default_factory=dict
    )  # our label name -> the alias's; the others keep their names
    values: Mapping[str, str] | None = None  # our label value -> the alias's; samples with other values are omitted
    base_labels: tuple[str, ...] = BASE_LABELS
    bounds: tuple[float, ...] | None = None  # of a histogram, where the alias has fewer buckets
    constant: float | None = None  # a fixed value: what it counts does not exist here


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One metric. Its samples have the base labels and `labels`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] | None = None  # a histogram's; None: 1, 2, 5, 10 ... up to the context's length
    aliases: tuple[Alias, ...] = ()
    alert: str = ""  # the alert that operators' guides recommend
    scope: Scope = "engine"  # with several engines: one sample for each, or one without the label `engine`
    over_engines: OverEngines = "sum"  # how the server reads a gauge of several engines as one number

    @property
    def as_alias(self) -> Alias:
        """The name of the series, in the form of an alias."""
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
