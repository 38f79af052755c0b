"""Rows under a grammar sample from the softmax over the allowed tokens; other rows are not affected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.sampling import PlacedMasks, Sampled, Sampler
from headrace.steps import BROKEN, Bitmask, IntArray
from headrace.types import SamplingParams
from tests.sampling.test_distributions import MIN_P_VALUE, p_value

VOCAB = 70
NUM_SAMPLES = 10_000


class FixedMasks:
    """Allows the same tokens in each of some slots."""

    def __init__(self, slots: list[int], allowed: list[int]) -> None:
        bits = np.zeros(96, np.uint8)
        bits[allowed] = 1
        self.slots: IntArray = np.array(slots, np.int64)
        self._bits = np.tile(np.packbits(bits, bitorder="little").view(np.int32), (len(slots), 1))

    def bits(self) -> Bitmask:
        return self._bits


def sampler_of(*params: SamplingParams) -> Sampler:
    sampler = Sampler(len(params), VOCAB)
    for slot, each in enumerate(params):
        sampler.enter_slot(slot, each, seed=11 + slot, prompt_len=1, end_len=10**9, stop_token_ids=())
    return sampler


def bound(**params: Any) -> SamplingParams:
    return SamplingParams(structured_outputs={"json_object": True}, **params)


def sample_bound(logits: Tensor, allowed: list[int], **params: Any) -> Tensor:
    """Counts how often each token is sampled."""
    sampler = sampler_of(bound(**params))
    slots, lens = torch.zeros(NUM_SAMPLES, dtype=torch.int64), torch.arange(NUM_SAMPLES)
    bits = torch.from_numpy(FixedMasks([0], allowed).bits()).expand(NUM_SAMPLES, -1).contiguous()
    masks = PlacedMasks(torch.arange(NUM_SAMPLES), bits)
    sampled = sampler.sample(logits.expand(NUM_SAMPLES, -1).contiguous(), slots, lens, masks=masks)
    return torch.bincount(sampled.tokens, minlength=VOCAB).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_what_is_allowed_is_sampled_as_the_softmax_over_it(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randn(VOCAB)
    allowed = [0, 3, 31, 32, 33, 40, 63, 64, 69]
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[allowed] = (logits[allowed].double() / temperature).softmax(0)
    observed = sample_bound(logits.to(dtype), allowed, temperature=temperature)
    assert p_value(observed, expected) > MIN_P_VALUE


def test_filters_count_only_what_is_allowed() -> None:
    logits = torch.arange(VOCAB) / 10.0
    observed = sample_bound(logits, [5, 6, 7], top_k=2)
    assert observed.nonzero().flatten().tolist() == [6, 7]


def test_greedy_rows_take_the_likeliest_that_is_allowed() -> None:
    observed = sample_bound(torch.arange(VOCAB) / 10.0, [2, 41, 8], temperature=0)
    assert observed[41] == NUM_SAMPLES


def test_a_row_that_can_sample_nothing_is_broken() -> None:
    sampler = sampler_of(bound())
    masks = PlacedMasks.of(FixedMasks([0], []), np.array([0]), torch.device("cpu"))
    sampled = sampler.sample(torch.randn(1, VOCAB), torch.tensor([0]), torch.tensor([4]), masks=masks)
    assert sampled.flags.tolist() == [BROKEN]


def test_other_rows_sample_as_if_there_were_no_masks() -> None:
    params = [SamplingParams(), bound(), SamplingParams(top_p=0.5, logprobs=3), bound(), SamplingParams(temperature=0)]
    logits = torch.randn(5, VOCAB)
    slots = torch.tensor([4, 1, 0, 3, 2])
    placed = PlacedMasks.of(FixedMasks([3, 1], [7]), slots.numpy(), torch.device("cpu"))
    free = [row for row, slot in enumerate(slots.tolist()) if slot not in (1, 3)]
    for length in range(40):
        lens = torch.full((5,), length)
        held: Sampled = sampler_of(*params).sample(logits.clone(), slots, lens, masks=placed)
        alone = sampler_of(*params).sample(logits[free], slots[free], lens[free])
        assert torch.equal(held.tokens[free], alone.tokens)
        assert held.tokens[[1, 3]].tolist() == [7, 7]
        assert held.logprobs is not None and alone.logprobs is not None
        assert torch.equal(held.logprobs.chosen, alone.logprobs.chosen)


def test_log_probabilities_are_from_before_the_mask() -> None:
    logits = torch.randn(1, VOCAB)
    masks = PlacedMasks.of(FixedMasks([0], [12]), np.array([0]), torch.device("cpu"))
    sampled = sampler_of(bound(logprobs=1)).sample(logits.clone(), torch.tensor([0]), torch.tensor([4]), masks=masks)
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.item() == pytest.approx(logits[0].log_softmax(0)[12].item())
    assert sampled.logprobs.top_ids.item() == logits[0].argmax()


def test_masks_of_slots_that_are_not_in_the_batch_are_left_out() -> None:
    masks = FixedMasks([9, 2, 5], [1])
    placed = PlacedMasks.of(masks, np.array([7, 5, 0, 9]), torch.device("cpu"))
    assert placed.rows.tolist() == [3, 1]
    assert placed.bits.shape[0] == 2


def test_a_slot_under_a_grammar_is_not_plain() -> None:
    sampler = sampler_of(SamplingParams(), bound())
    assert sampler.is_plain(np.array([0])) and not sampler.is_plain(np.array([0, 1]))


def test_a_row_under_a_grammar_is_not_sampled_from_without_its_mask() -> None:
    with pytest.raises(AssertionError, match="masks"):
        sampler_of(bound()).sample(torch.randn(1, VOCAB), torch.tensor([0]), torch.tensor([4]))
