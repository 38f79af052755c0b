"""What a sampling feature is: the columns it owns on the device, who uses it, and what it does in a step.

A feature holds no state. Its columns have one entry a row, written at admission; a row that does not use it has
their defaults, with which the feature changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headrace.types import SamplingParams

LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is drawn for certain, and dividing by it would only overflow


@dataclass(frozen=True, slots=True)
class Column:
    """One value a row, or `width` of them."""

    name: str
    dtype: type[np.generic]
    default: float
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sequence was admitted with."""

    params: SamplingParams
    seed: int
    prompt_len: int
    end_len: int
    stop_token_ids: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step that draw a token."""

    logits: Tensor  # [R, V]
    rows: Tensor  # [R] int64
    lens: Tensor  # [R] int64, tokens each sequence has before the one to be drawn
    columns: Mapping[str, Tensor]  # [max_rows] or [max_rows, width] each

    def column(self, name: str, users: Tensor) -> Tensor:
        """The settings of those rows that stand at `users` [Q] in the batch: [Q] or [Q, width]."""
        return self.columns[name][self.rows[users]]


class Feature(Protocol):
    @property
    def columns(self) -> Sequence[Column]: ...

    def is_used(self, terms: Terms) -> bool: ...

    def settings(self, terms: Terms) -> Mapping[str, Any]:
        """The values of its columns for a row that uses it."""
        ...


class LogitsFeature(Feature, Protocol):
    def apply(self, batch: Batch, users: Tensor) -> None:
        """Changes batch.logits[users] in place."""
        ...


class FinishFeature(Feature, Protocol):
    def mark(self, batch: Batch, users: Tensor, tokens: Tensor, finished: Tensor) -> None:
        """Marks in `finished` [R] those users whose token [R] ends their sequence."""
        ...
