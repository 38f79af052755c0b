"""What a sampling feature is: the parameters it implements, its columns on the device, and what it does in a step.

A feature has no state. Its columns have one entry per slot, written when a sequence enters the slot. A slot that does
not use the feature has the defaults, with which the feature changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headrace.types import SamplingParams

MIN_TEMPERATURE = 1e-5  # below it sampling is greedy: dividing by it could overflow


@dataclass(frozen=True, slots=True)
class Column:
    """One value per slot, or `width` of them."""

    name: str
    dtype: type[np.generic]
    default: float
    width: int | None = None
    is_rare: bool = False  # takes no memory until a slot uses it
    is_bitmap: bool = False  # one bit per token of the vocabulary

    def for_vocabulary(self, vocab_size: int) -> Column:
        return replace(self, width=-(-vocab_size // 8)) if self.is_bitmap else self


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """What the features know of a sequence when it enters a slot."""

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
    """The rows of one step for which a token is sampled."""

    logits: Tensor  # [R, V]
    slots: Tensor  # [R] int64, the slot of each row
    lens: Tensor  # [R] int64, tokens of each sequence before the one to be sampled
    columns: Mapping[str, Tensor]  # [num_slots] or [num_slots, width] each
    tokens: Tensor | None = None  # [num_slots, max_len] int32; past a sequence's length they may be anything
    max_len: int = 0  # most tokens of a row that uses the current feature
    max_answer_len: int = 0  # most tokens in its answer

    def column(self, name: str, rows: Tensor) -> Tensor:
        """Returns the settings of these rows of the batch [Q]: [Q] or [Q, width]."""
        return self.columns[name][self.slots[rows]]


class Feature(Protocol):
    @property
    def params(self) -> Sequence[str]: ...  # the fields of SamplingParams that it implements

    @property
    def columns(self) -> Sequence[Column]: ...

    def is_used(self, sequence: SequenceSettings) -> bool: ...

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        """Returns the values of its columns for a sequence that uses it."""
        ...


class LogitsFeature(Feature, Protocol):
    def apply(self, batch: Batch, rows: Tensor) -> None:
        """Changes batch.logits[rows] in place."""
        ...
