"""Random numbers: Philox against its published answers, and seeds of every size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.cpu import sample as kernel
from headrace.sampling import Sampler
from headrace.sampling.philox import philox, uniform
from headrace.types import SamplingParams

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_on_tensors_gives_the_published_answers(counter, key, answer):
    words = philox(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert tuple(word.item() for word in words) == answer


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_in_the_kernel_gives_the_published_answers(counter, key, answer):
    assert kernel.philox(*(np.uint64(word) for word in (*counter, *key))) == answer


@pytest.mark.parametrize("seed, position", [(0, 0), (-1, 5), (2**63 - 1, 2**31 - 1), (-(2**63), 1), (12345, 2**40)])
def test_kernel_and_tensors_have_the_same_uniforms(seed, position):
    assert kernel.uniform(seed, position) == uniform(torch.tensor([seed]), torch.tensor([position])).item()


def test_uniforms_are_spread_evenly_over_the_unit_interval():
    numbers = uniform(torch.full((20_000,), 7), torch.arange(20_000))
    counts = torch.histc(numbers, bins=20, min=0.0, max=1.0)
    assert 0.0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1.0
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


def sampled(seed: int) -> list[int]:
    sampler = Sampler(1, 1000)
    sampler.enter_slot(0, SamplingParams(), seed=seed, prompt_len=1, end_len=10**6, stop_token_ids=())
    return sampler.sample(torch.zeros(40, 1000), torch.zeros(40, dtype=torch.int64), torch.arange(40)).tokens.tolist()


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others():
    assert sampled(3) == sampled(3)
    assert sampled(3) != sampled(4)


def test_every_64_bit_seed_is_taken_and_both_of_its_halves_count():
    tokens = [sampled(seed) for seed in (0, 1, 2**32, 2**63, 2**64 - 2, -3)]
    assert len({tuple(line) for line in tokens}) == 6


def test_a_negative_seed_is_its_64_bit_pattern():
    assert sampled(-1) == sampled(2**64 - 1)


def test_positions_have_their_own_random_numbers():
    assert len(set(sampled(0))) > 30  # 40 samples among 1,000
