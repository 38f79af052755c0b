"""How the texts of an encoder's step are packed."""

from __future__ import annotations

import numpy as np

from headrace.runner.packing import pack
from headrace.steps import ReadoutChunk, SlotEntry, StepPlan
from headrace.types import SamplingParams


def entry(slot: int, tokens: list[int], second_start: int | None = None) -> SlotEntry:
    ids = np.array(tokens, np.int32)
    size = len(tokens)
    return SlotEntry(slot, ids, 0, size, size + 1, 0, SamplingParams(seed=0), (), second_start=second_start)


def test_texts_are_sorted_by_length_with_their_positions_types_and_pooled_tokens() -> None:
    plan = StepPlan(
        step=0,
        slots=np.array([3, 1]),
        num_tokens=np.array([2, 3]),
        samples=np.array([False, False]),
        num_batched_tokens=5,
        slot_entries=(entry(3, [7, 8]), entry(1, [4, 5, 6], second_start=2)),
        readout_chunks=(
            ReadoutChunk(3, 0, 1, None, is_last=True),
            ReadoutChunk(1, 0, 3, None, is_last=True, num_pooled=3),
        ),
    )
    texts = pack(plan)
    assert texts.token_ids.tolist() == [4, 5, 6, 7, 8] and texts.starts.tolist() == [0, 3, 5]
    assert texts.positions.tolist() == [0, 1, 2, 0, 1] and texts.types.tolist() == [0, 0, 1, 0, 0]
    assert texts.readouts.indexes.tolist() == [3, 0, 1, 2]
    np.testing.assert_allclose(texts.readouts.shares, [1, 1 / 3], rtol=1e-6)
