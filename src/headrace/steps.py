"""What the scheduler and a runner say to each other: a plan goes down, a result comes back a step or more later.

Arrays are numpy, rows are device slots. A runner executes plans in the order of their submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.types import SamplingParams, TokenIds

IntArray = npt.NDArray[np.int64]  # what numpy and torch index with, so nothing is converted on the way
BoolArray = npt.NDArray[np.bool_]

GOES_ON, STOPPED, FULL, BROKEN = 0, 1, 2, 3  # how a row stands after its token: `StepResult.finished`


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A sequence moves into a row: everything the device needs to know of it, sent once."""

    slot: int
    token_ids: TokenIds  # all that are known: the prompt, and after a preemption the answer so far
    num_computed: int  # leading tokens whose keys and values are already in the cache
    prompt_len: int
    end_len: int  # total length at which the sequence ends
    seed: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    num_prompt_logprobs: int | None = None  # the prompt's log-probabilities are wanted, with so many of the likeliest


@dataclass(frozen=True, slots=True)
class TableWrites:
    """New entries of the device's block tables: tables[rows, indexes] = blocks."""

    slots: IntArray
    indexes: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Read:
    """What to report of a row's tokens in a step: of those from `first` on, either the sum of their hidden states
    after the final norm, or the log-probability of each one's target as the next token."""

    slot: int
    first: int  # counted among the row's tokens of this step
    num_tokens: int
    targets: TokenIds | None
    is_last: bool  # the row ends with this step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first the changes (admissions, table writes, copies), then `num_tokens` of each row."""

    step: int
    slots: IntArray  # [S]
    num_tokens: IntArray  # [S] tokens to compute of each row, from where it stands
    samples: BoolArray  # [S] whether a next token is drawn after the last of them
    num_batched_tokens: int
    slot_entries: tuple[SlotEntry, ...] = ()
    table_writes: TableWrites | None = None
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks
    reads: tuple[Read, ...] = ()
    is_steady: bool = False  # the same rows as the step before, one token each: only table writes can differ


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities for those rows of a result that asked: [Q] and [Q, widest n]."""

    slots: IntArray
    chosen: npt.NDArray[np.float32]
    ranks: IntArray
    top_ids: IntArray
    top_values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """Log-probabilities of one row's prompt tokens, from position `start` on: [N] and [N, n or more]."""

    slot: int
    start: int
    chosen: npt.NDArray[np.float32]
    ranks: IntArray
    top_ids: IntArray
    top_values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a `Read` brought: [H], or a value for each target."""

    slot: int
    is_last: bool
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew, for the rows that drew, and what it found and read of prompts."""

    step: int
    slots: IntArray
    tokens: IntArray
    finished: npt.NDArray[np.uint8]
    logprobs: StepLogprobs | None = None
    prompt_logprobs: tuple[StepPromptLogprobs, ...] = ()
    readings: tuple[Reading, ...] = ()


Bitmask = npt.NDArray[np.int32]  # [Q, words]: token t is bit t % 32 of word t // 32; bits past the vocabulary are free


class Masks(Protocol):
    """What rows under a grammar may draw in one step. Known only when the steps before are: `bits` waits for them, so a
    runner asks between the model, which does not need it, and the draw. It asks once, or not at all if nobody draws."""

    @property
    def slots(self) -> IntArray: ...  # [Q], of those that draw in the step

    def bits(self) -> Bitmask: ...  # a line for each of `rows`


class Runner(Protocol):
    """A device as the engine sees it. `submit` queues and returns, unless it is given masks; else only `collect` waits.
    A ticket may be collected twice."""

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def close(self) -> None: ...
