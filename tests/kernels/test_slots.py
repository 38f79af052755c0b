"""What a step on a CPU reads from the slots and appends to them: the kernels and their reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from headrace.kernels import cpu, reference
from headrace.steps import FULL, STOPPED, UNFINISHED
from tests.kernels.verifications import MAX_LEN, NUM_SLOTS, Verification

both = pytest.mark.parametrize("kernels", [cpu, reference], ids=["kernel", "reference"])


@both
def test_rows_of_a_step_follow_each_other_slot_after_slot(kernels: ModuleType) -> None:
    tokens, tables = torch.arange(5 * 40).view(5, 40).int(), torch.randperm(5 * 10).view(5, 10).int()
    slots, num_tokens, starts = torch.tensor([3, 0, 4]), torch.tensor([2, 1, 7]), torch.tensor([6, 39, 0])
    rows = kernels.lay_out_rows(slots, num_tokens, starts, tokens, tables, 4)
    places = [(3, 6), (3, 7), (0, 39), *((4, position) for position in range(7))]
    assert rows.token_ids.tolist() == [int(tokens[place]) for place in places]
    assert rows.positions.tolist() == [position for _, position in places]
    assert rows.slot_mapping.tolist() == [int(tables[slot, at // 4]) * 4 + at % 4 for slot, at in places]
    assert rows.query_starts.tolist() == [0, 2, 3, 10]
    assert rows.context_lens.tolist() == [8, 40, 7]
    assert [each.dtype for each in rows] == [torch.int32, torch.int64, torch.int64, torch.int32, torch.int32]


@both
@pytest.mark.parametrize("most_drafts", [0, 4])
def test_a_slot_gets_the_drafts_that_were_sampled_and_one_more_token(kernels: ModuleType, most_drafts: int) -> None:
    step = Verification.random(most_drafts=most_drafts)
    nums, states = (list(each) for each in zip(*step.expected(), strict=True))
    assert set(nums) >= ({1, 2, 3} if most_drafts else {1})
    tokens, lens, ended = step.tokens.clone(), step.lens.clone(), torch.zeros(NUM_SLOTS, dtype=torch.bool)
    found = kernels.append_tokens(
        step.slots, step.num_rows, step.sampled, step.flags, tokens, lens, ended, step.end_len, step.stops
    )
    assert (found.num_tokens.tolist(), found.states.tolist()) == (nums, states)
    assert found.num_tokens.dtype == torch.int64 and found.states.dtype == torch.uint8
    assert torch.equal(lens, step.lens.index_add(0, step.slots, found.num_tokens))
    assert ended[step.slots].tolist() == [state != UNFINISHED for state in states]
    for slot, first, num in zip(step.slots.tolist(), step.first_rows.tolist(), nums, strict=True):
        start = int(step.lens[slot])
        assert tokens[slot, start : start + num].tolist() == step.sampled[first : first + num].tolist()
    others = [slot for slot in range(NUM_SLOTS) if slot not in step.slots.tolist()]
    assert torch.equal(tokens[others], step.tokens[others])


@both
def test_a_slot_takes_drafts_up_to_the_first_that_was_not_sampled(kernels: ModuleType) -> None:
    tokens = torch.tensor([[0, 5, 8, 0], [0, 1, 2, 0], [0, 0, 0, 0]], dtype=torch.int32)
    lens, end_len, stops = torch.tensor([1, 1, 1]), torch.tensor([9, 3, 9]), torch.tensor([[-1], [-1], [9]])
    sampled, flags = torch.tensor([5, 6, 7, 1, 2, 3, 9]), torch.zeros(7, dtype=torch.uint8)
    slots, num_rows, ended = torch.arange(3), torch.tensor([3, 3, 1]), torch.zeros(3, dtype=torch.bool)
    found = kernels.append_tokens(slots, num_rows, sampled, flags, tokens, lens, ended, end_len, stops)
    assert found.num_tokens.tolist() == [2, 2, 1]  # 8 was not sampled after 5; 2 ends its sequence
    assert found.states.tolist() == [UNFINISHED, FULL, STOPPED]
    assert [row[:end] for row, end in zip(tokens.tolist(), lens.tolist(), strict=True)] == [
        [0, 5, 6],
        [0, 1, 2],
        [0, 9],
    ]


@both
def test_a_stop_token_at_the_longest_length_counts_as_a_stop(kernels: ModuleType) -> None:
    one, tokens, lens = torch.ones(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1, 1])
    ended, stops = torch.zeros(2, dtype=torch.bool), torch.tensor([[-1, 7], [-1, -1]])
    flags = torch.zeros(2, dtype=torch.uint8)
    sampled = torch.tensor([7, 7])
    found = kernels.append_tokens(torch.tensor([0, 1]), one, sampled, flags, tokens, lens, ended, 2 * one, stops)
    assert found.states.tolist() == [STOPPED, FULL]


@both
def test_nothing_is_written_past_the_end_of_a_full_slot(kernels: ModuleType) -> None:
    one, tokens = torch.ones(1, dtype=torch.int64), torch.full((2, MAX_LEN), 5, dtype=torch.int32)
    lens, ended = torch.tensor([MAX_LEN, 3]), torch.zeros(2, dtype=torch.bool)
    flags = torch.zeros(1, dtype=torch.uint8)
    kernels.append_tokens(
        0 * one, one, 7 * one, flags, tokens, lens, ended, torch.tensor([9, 9]), -torch.ones(2, 4).long()
    )
    assert (tokens == 5).all() and lens.tolist() == [MAX_LEN + 1, 3] and ended.tolist() == [True, False]
