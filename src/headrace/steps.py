"""What scheduler and runner exchange: a `StepPlan` goes down, its `StepResult` comes back one or more steps later.

Arrays are numpy. A slot is a sequence's place in the device's tables. A runner executes plans in the order of their
submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.types import SamplingParams, TokenIds

IntArray = npt.NDArray[np.int64]  # the index type of numpy and torch, so nothing is converted on the way
BoolArray = npt.NDArray[np.bool_]

# State of a slot after its token was sampled: the values of `StepResult.finished`.
UNFINISHED = 0
STOPPED = 1  # the token is one of its stop tokens (end of sequence included)
FULL = 2  # it has reached `end_len`
BROKEN = 3  # no token could be sampled: NaN logits, or every token is forbidden


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A sequence enters a slot: everything that the device needs to know about it, sent once."""

    slot: int
    token_ids: TokenIds  # all known tokens: the prompt, and after a preemption the answer so far
    num_computed: int  # leading tokens whose keys and values are already in the KV cache
    prompt_len: int
    end_len: int  # total length at which the sequence ends
    seed: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    num_prompt_logprobs: int | None = None  # if prompt log-probabilities are wanted: the number of top tokens for each
    second_start: int | None = None  # see `types.Readout`
    adapter: int = 0  # 0: none; i: the one at i - 1 in the device's tables of adapters


@dataclass(frozen=True, slots=True)
class TableWrites:
    """New entries of the device's block tables: tables[slots, indexes] = blocks."""

    slots: IntArray
    indexes: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class ReadoutChunk:
    """The part of a readout (`types.Readout`: pooling or prompt scoring) that one step computes.

    It covers the slot's tokens from `first` on. Without targets the device returns their part of the mean hidden state
    after the final norm, put through the model's head if it has one; with targets the log-probability of each target as
    the next token.
    """

    slot: int
    first: int  # index among the slot's tokens of this step
    num_tokens: int
    targets: TokenIds | None
    is_last: bool  # the sequence ends with this step
    num_pooled: int = 1  # tokens of the mean, those of all steps


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that are proposed to follow the known ones of each slot of a plan. The step verifies them.

    known         a b c                  c is the one token that a decode step would compute
    drafts              d e f            lens = 3
    rows              c d e f            the step computes 1 + 3 tokens, and samples after each
    sampled             d e x y          equal to the drafts up to e: the slot gets d e x, and y is dropped
    """

    lens: IntArray  # [S]
    tokens: IntArray | None = None  # [sum(lens)], slot after slot; None: the runner's draft model proposes them


@dataclass(frozen=True, slots=True)
class BlockTransfers:
    """Copies between KV-cache blocks and places of the host tier (`kv/tiers.py`), of whole blocks in all layers.

    First all copies out, then all copies in. They may run beside the step: it does not write the blocks that are copied
    out, nor touch those that are copied in, unless `is_urgent`. The next step comes after them in any case.
    """

    out_blocks: IntArray  # [O], to out_places
    out_places: IntArray
    in_places: IntArray  # [I], to in_blocks
    in_blocks: IntArray
    is_urgent: bool  # the step itself comes after them too


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first the changes (slot entries, table writes, block copies), then `num_tokens` of each slot.

    With `drafts` all slots decode, a slot has 1 + its drafts tokens, and no other step is in flight.
    """

    step: int
    slots: IntArray  # [S]
    num_tokens: IntArray  # [S] tokens to compute for each slot, after those already computed
    samples: BoolArray  # [S] whether a next token is sampled after the last of them
    num_batched_tokens: int
    slot_entries: tuple[SlotEntry, ...] = ()
    table_writes: TableWrites | None = None
    copies: tuple[tuple[int, int], ...] = ()  # (source, target) blocks
    readout_chunks: tuple[ReadoutChunk, ...] = ()
    # [slots that decode, which come first] the token that each computes. In a pipeline the stage that embeds it has not
    # sampled it, so the host sends it. None: the device has it.
    next_tokens: IntArray | None = None
    is_steady: bool = False  # a decode step for the same slots as the step before: only table writes can differ
    drafts: Drafts | None = None
    transfers: BlockTransfers | None = None


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities for the slots that asked for them: [Q] and [Q, largest number of top tokens]. A slot appears
    once for each of its tokens, in their order."""

    slots: IntArray
    chosen: npt.NDArray[np.float32]
    ranks: IntArray
    top_ids: IntArray
    top_values: npt.NDArray[np.float32]
    named_values: npt.NDArray[np.float32] | None = None  # [Q, m] of the tokens that requests named; None: none did


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """Log-probabilities of one slot's prompt tokens, from position `start` on: [N] and [N, top tokens or more]."""

    slot: int
    start: int
    chosen: npt.NDArray[np.float32]
    ranks: IntArray
    top_ids: IntArray
    top_values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReadoutResult:
    """The values of a `ReadoutChunk`: [H] or the outputs of the head, or one value for each target."""

    slot: int
    is_last: bool
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of the slots that sampled, and the step's prompt log-probabilities and readouts."""

    step: int
    slots: IntArray  # [S]
    tokens: IntArray  # [S], or with `num_sampled` slot after slot
    finished: npt.NDArray[np.uint8]  # [S] UNFINISHED, STOPPED, FULL or BROKEN
    logprobs: StepLogprobs | None = None
    prompt_logprobs: tuple[StepPromptLogprobs, ...] = ()
    readout_results: tuple[ReadoutResult, ...] = ()
    num_sampled: IntArray | None = None  # [S] tokens of each slot, one or more; None: one each


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter as scheduler and device know it."""

    index: int  # in the device's tables, from 0
    number: int  # never used again, also if the same adapter is loaded again


DraftsBySlot = Mapping[int, Sequence[int]]
Bitmask = npt.NDArray[np.int32]  # [Q, words]: token t is bit t % 32 of word t // 32; bits past the vocabulary are free


class Masks(Protocol):
    """The tokens that slots under a grammar may sample in one step.

    They depend on the tokens of the steps before, so `bits` waits for those. A runner calls it once, after it has
    launched the model, which does not need the masks, and before sampling; or not at all if no slot samples.
    """

    @property
    def slots(self) -> IntArray: ...  # [Q], those that sample in the step

    def bits(self, drafts: DraftsBySlot | None = None) -> Bitmask:
        """One row for each of `slots`; with drafts, one more for each of the slot's drafts, after those before it."""
        ...


class Runner(Protocol):
    """A device as the engine sees it. `submit` queues a step and returns at once, unless it is given masks; otherwise
    only `collect` waits. A ticket may be collected twice."""

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class HoldsAdapters(Protocol):
    """A runner whose model has tables of LoRA adapters."""

    def read_adapter(self, path: str) -> Any:
        """Read an adapter into host memory and check it. Touches nothing of the steps: from any thread."""

    def write_adapter(self, index: int, adapter: Any) -> None:
        """Make what `read_adapter` has returned the adapter at `index`, after the submitted steps."""
