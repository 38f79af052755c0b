"""Which of a step's sampled tokens count, where the step verified drafts.

A row samples what its sequence would sample after the drafts before it: with the same logits, settings, tokens and
random number as without drafts. A draft is accepted if it equals the token sampled before it. So a sequence gets the
tokens that it would have got one at a time, and its distribution is unchanged, whatever was drafted: a draft t is
accepted with probability p(t), and the token in the place of a rejected one has the probabilities of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.steps import UNFINISHED, BoolArray, DraftsBySlot, IntArray, StepLogprobs


@dataclass(frozen=True, slots=True)
class Verified:
    """The tokens that slots get: the accepted drafts and one more of each, slot after slot."""

    num_sampled: IntArray  # [S]
    is_kept: BoolArray  # [R] rows whose token counts
    last_rows: IntArray  # [S] the row of each slot's last token
    finished: npt.NDArray[np.uint8]  # [S]


def verify(sampled: IntArray, finished: npt.NDArray[np.uint8], drafts: IntArray, num_rows: IntArray) -> Verified:
    """Compare the tokens sampled in each row [R], and whether they end their sequence [R], with the drafts
    [R - S]. `num_rows` [S] is one more than the drafts of each slot."""
    starts = np.cumsum(num_rows) - num_rows
    is_first = np.zeros(len(sampled), np.bool_)
    is_first[starts] = True
    follows = np.zeros(len(sampled), np.bool_)  # rows whose input is what the row before sampled
    follows[~is_first] = drafts == sampled[:-1][~is_first[1:]]
    follows[1:] &= finished[:-1] == UNFINISHED
    # Rows after the first that does not follow are not used: count the breaks since the slot's first row.
    num_breaks = np.cumsum(~follows)
    is_kept = num_breaks == np.repeat(num_breaks[starts], num_rows)
    num_sampled = np.add.reduceat(is_kept.astype(np.int64), starts)
    last_rows = starts + num_sampled - 1
    return Verified(num_sampled, is_kept, last_rows, finished[last_rows])


def drafts_by_slot(slots: IntArray, drafts: IntArray, lens: IntArray) -> DraftsBySlot:
    parts = np.split(drafts, np.cumsum(lens)[:-1])
    return {slot: part.tolist() for slot, part in zip(slots.tolist(), parts, strict=True)}


def kept_logprobs(logprobs: StepLogprobs, row_slots: IntArray, is_kept: BoolArray) -> StepLogprobs:
    """Those of rows whose token counts. A slot that asked for them has all of its rows in `logprobs`."""
    kept = is_kept[np.isin(row_slots, logprobs.slots)]
    return StepLogprobs(
        slots=logprobs.slots[kept],
        chosen=logprobs.chosen[kept],
        ranks=logprobs.ranks[kept],
        top_ids=logprobs.top_ids[kept],
        top_values=logprobs.top_values[kept],
        named_values=None if logprobs.named_values is None else logprobs.named_values[kept],
    )
