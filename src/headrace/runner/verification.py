"""Which of a step's sampled tokens count, where the step verified drafts.

A row samples what its sequence would sample after the drafts before it: with the same logits, settings, tokens and
random number as without drafts. A draft is accepted if it equals the token sampled before it. So a sequence gets the
tokens that it would have got one at a time, and its distribution is unchanged, whatever was drafted: a draft t is
accepted with probability p(t), and the token in the place of a rejected one has the probabilities of the others.

The comparison is made where tokens are appended to their slots: `ops.append_tokens`, and `accept_drafts` of a GPU.
"""

from __future__ import annotations

import numpy as np

from headrace.steps import BoolArray, DraftsBySlot, IntArray, StepLogprobs


def kept_rows(num_rows: IntArray, num_sampled: IntArray) -> BoolArray:
    """The rows whose token counts, [R]: the first `num_sampled` of the `num_rows` of each slot."""
    offsets = np.arange(int(num_rows.sum())) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    return offsets < np.repeat(num_sampled, num_rows)


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
