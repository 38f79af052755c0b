"""What a sampling feature is: the columns it owns on the device, who uses it, and what it does in a step.

A feature holds no state. Its columns have one entry a row, written at admission; a row that does not use it has
their defaults, with which the feature changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headrace.types import SamplingParams

MIN_TEMPERATURE = 1e-5  # below it the likeliest token is drawn for certain, and dividing by it would only overflow


@dataclass(frozen=True, slots=True)
class Column:
    """One value a row, or `width` of them."""

    name: str
    dtype: type[np.generic]
    default: float
    width: int | None = None
    is_rare: bool = False  # it takes no memory until a row uses it
    is_bitmap: bool = False  # as wide as the vocabulary, a bit a token

    def for_vocabulary(self, vocab_size: int) -> Column:
        return replace(self, width=-(-vocab_size // 8)) if self.is_bitmap else self


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """What a sequence was admitted with."""

    params: SamplingParams
    seed: int
    prompt_len: int
    end_len: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step that draw a token."""

    logits: Tensor  # [R, V]
    slots: Tensor  # [R] int64
    lens: Tensor  # [R] int64, tokens each sequence has before the one to be drawn
    columns: Mapping[str, Tensor]  # [max_rows] or [max_rows, width] each
    tokens: Tensor | None = None  # [max_rows, max_len] int32, of all rows; past its length a row's may be anything
    max_len: int = 0  # no row that uses the feature at hand has more
    max_answer_len: int = 0  # nor more of them in its answer

    def column(self, name: str, rows: Tensor) -> Tensor:
        """The settings of those rows that stand at `rows` [Q] in the batch: [Q] or [Q, width]."""
        return self.columns[name][self.slots[rows]]


class Feature(Protocol):
    @property
    def columns(self) -> Sequence[Column]: ...

    def is_used(self, sequence: SequenceSettings) -> bool: ...

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        """The values of its columns for a row that uses it."""
        ...


class LogitsFeature(Feature, Protocol):
    def apply(self, batch: Batch, rows: Tensor) -> None:
        """Changes batch.logits[rows] in place."""
        ...


class FinishFeature(Feature, Protocol):
    def mark(self, batch: Batch, rows: Tensor, tokens: Tensor, finished: Tensor) -> None:
        """Marks in `finished` [R] those rows whose token [R] ends their sequence."""
        ...
