"""Counts what is sampled: each filter and their order, by chi-square tests with the seed of the test run.

A correct sampler has a p-value below the limit once in a billion seeds. A wrong one samples what it must not, or misses
by many standard deviations: its p-value is practically 0.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.sampling import Sampler
from headrace.types import SamplingParams

NUM_SAMPLES = 10_000
NUM_REFERENCE_SAMPLES = 2_000  # sorting is slow
MIN_EXPECTED = 10  # samples of a token or of several; a count of fewer has no normal distribution
MIN_P_VALUE = 1e-9


def seed() -> int:
    """The seed of the test, which a failure names."""
    return torch.initial_seed() % 2**31


def counts(logits: Tensor, num_samples: int = NUM_SAMPLES, **params: Any) -> Tensor:
    """Counts how often each token is sampled: float32 logits use the kernel, float64 the reference."""
    sampler = Sampler(1, logits.shape[0])
    settings = SamplingParams(**params)
    sampler.enter_slot(0, settings, seed=seed(), prompt_len=1, end_len=10**9, stop_token_ids=())
    slots, lens = torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples)
    tokens = sampler.sample(logits.expand(num_samples, -1).contiguous(), slots, lens).tokens
    return torch.bincount(tokens, minlength=logits.shape[0]).double()


def p_value(observed: Tensor, probabilities: Tensor) -> float:
    """Returns the chi-square test's p-value; 0 if an impossible token was sampled. Rare tokens are counted together."""
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities / probabilities.sum() * observed.sum()
    is_rare = expected < MIN_EXPECTED
    if 0 < expected[is_rare].sum() < MIN_EXPECTED and not is_rare.all():  # together they are still rare
        is_rare[expected.masked_fill(is_rare, math.inf).argmin()] = True
    observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = ((expected > 0).sum() - 1).double()
    return 1.0 if freedom < 1 else torch.special.gammaincc(freedom / 2, statistic / 2).item()


def assert_sampled_as(probabilities: list[float] | Tensor, logits: Tensor, **params: Any) -> None:
    expected = torch.as_tensor(probabilities, dtype=torch.float64)
    assert p_value(counts(logits.float(), **params), expected) > MIN_P_VALUE
    assert p_value(counts(logits.double(), NUM_REFERENCE_SAMPLES, **params), expected) > MIN_P_VALUE


FOUR = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def test_plain_sampling_follows_the_softmax():
    assert_sampled_as([0.4, 0.3, 0.2, 0.1], FOUR)


def test_temperature_divides_the_logits():
    assert_sampled_as([0.16, 0.09, 0.04, 0.01], FOUR, temperature=0.5)  # the squares
    assert_sampled_as([0.4**0.5, 0.3**0.5, 0.2**0.5, 0.1**0.5], FOUR, temperature=2.0)


def test_top_k_renormalizes_what_it_keeps():
    assert_sampled_as([4 / 7, 3 / 7, 0, 0], FOUR, top_k=2)


def test_top_p_renormalizes_what_it_keeps():
    assert_sampled_as([4 / 9, 3 / 9, 2 / 9, 0], FOUR, top_p=0.8)  # 0.7 does not reach it


def test_min_p_is_a_share_of_the_likeliest():
    assert_sampled_as([4 / 9, 3 / 9, 2 / 9, 0], FOUR, min_p=0.4)


def test_top_p_comes_after_temperature():
    # At temperature 0.5: 0.533, 0.300, 0.133, 0.033; two reach 0.8. Taken before it, three would be kept: 16 : 9 : 4.
    assert_sampled_as([16, 9, 0, 0], FOUR, temperature=0.5, top_p=0.8)


def test_min_p_comes_after_temperature():
    # At temperature 2 the ratios to the first are 1, 0.87, 0.71, 0.5. Before it, 1, 0.75, 0.5, 0.25: two would be kept.
    assert_sampled_as([2.0, 3**0.5, 2**0.5, 0], FOUR, temperature=2.0, min_p=0.6)


def test_top_p_counts_what_top_k_left():
    # Of the two kept, the first has 4/7 and reaches 0.5 alone. Of all four it has 0.4: two would be kept, 4 : 3.
    assert_sampled_as([1, 0, 0, 0], FOUR, top_k=2, top_p=0.5)


def test_top_p_counts_what_min_p_left():
    # As above, with min_p leaving the same two.
    assert_sampled_as([1, 0, 0, 0], FOUR, min_p=0.7, top_p=0.5)


def test_all_filters_together_in_their_order():
    logits = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03]).log()
    # Temperature 0.5: squares 900, 625, 400, 225, 49, 9. min_p 0.2 keeps four, top_k three (1925), top_p two (1525).
    assert_sampled_as([900, 625, 0, 0, 0, 0], logits, temperature=0.5, min_p=0.2, top_k=3, top_p=0.75)


def test_a_bias_multiplies_the_odds():
    assert_sampled_as([0.4, 0.6, 0.2, 0.025], FOUR, logit_bias={1: math.log(2), 3: -math.log(4)})


def test_what_is_allowed_is_renormalized():
    assert_sampled_as([0, 0.3, 0, 0.1], FOUR, allowed_token_ids=[1, 3])


def test_a_presence_penalty_divides_the_odds_of_what_the_answer_has():
    num_samples = 1000
    tokens = torch.full((1, num_samples + 2), 2, dtype=torch.int32)  # a prompt of one token, then the same for ever
    sampler = Sampler(1, 4, tokens=tokens)
    params = SamplingParams(presence_penalty=math.log(4), max_tokens=None)
    sampler.enter_slot(0, params, seed=seed(), prompt_len=1, end_len=10**9, stop_token_ids=())
    slots, lens = torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples) + 2
    sampled = sampler.sample(FOUR.expand(num_samples, -1).contiguous(), slots, lens).tokens
    observed = torch.bincount(sampled, minlength=4).double()
    assert p_value(observed, torch.tensor([0.4, 0.3, 0.05, 0.1], dtype=torch.float64)) > MIN_P_VALUE
    assert p_value(observed, torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)) < MIN_P_VALUE


def test_a_vocabulary_of_several_blocks_follows_the_softmax():
    logits = torch.randn(613) * 1.5
    assert_sampled_as(logits.double().softmax(0), logits)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99])
def test_top_p_over_several_blocks(top_p):
    logits = torch.randn(613) * 1.5
    probabilities = logits.double().softmax(0)
    ordered, order = probabilities.sort(descending=True)
    num_kept = int((ordered.cumsum(0) < top_p).sum()) + 1
    probabilities[order[num_kept:]] = 0.0
    assert_sampled_as(probabilities, logits, top_p=top_p)


@pytest.mark.parametrize("top_k", [3, 5, 100, 612])
def test_top_k_over_several_blocks(top_k):
    logits = torch.randn(613) * 1.5
    probabilities = (logits.double() / 1.3).softmax(0)
    probabilities[logits.argsort(descending=True)[top_k:]] = 0.0
    assert_sampled_as(probabilities, logits, top_k=top_k, temperature=1.3)


@pytest.mark.parametrize(
    "wrong", [[0.4, 0.3, 0.2, 0.1], [16, 9, 4, 0], [1, 1, 0, 0]], ids=["no filter", "top_p first", "no weights"]
)
def test_the_test_itself_refuses_wrong_distributions(wrong):
    observed = counts(FOUR, temperature=0.5, top_p=0.8)
    assert p_value(observed, torch.tensor(wrong, dtype=torch.float64)) < MIN_P_VALUE


def test_the_kernels_exponential_is_exact_to_a_float32():
    from headrace.kernels.cpu.sample import exp

    for x in [0.0, -1e-6, -0.3465, -0.3467, -1.0, -12.345, -50.0, -86.9]:
        x = torch.tensor(x, dtype=torch.float32).numpy()[()]
        assert exp(x) == pytest.approx(math.exp(float(x)), rel=1.2e-7)
