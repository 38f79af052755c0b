"""The fused kernel against the reference, and both on ties, extremes and invalid logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.sampling import reference
from headrace.sampling.feature import Batch
from headrace.sampling.features import FILTERS
from headrace.sampling.sample import sample
from headrace.steps import BROKEN

NAN, INF = float("nan"), float("inf")


def batch_of(logits: Tensor, **settings: float | list[float]) -> Batch:
    """Builds a batch whose row i is slot i; a setting is one value for all rows, or a list."""
    num_rows = logits.shape[0]

    def column(value: float | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    columns = {
        "temperature": column(settings.get("temperature", 1.0), torch.float64),
        "min_p": column(settings.get("min_p", 0.0), torch.float64),
        "top_k": column(settings.get("top_k", 0), torch.int64),
        "top_p": column(settings.get("top_p", 1.0), torch.float64),
        "seed": column(settings.get("seed", 0), torch.int64),
    }
    return Batch(logits, torch.arange(num_rows), torch.arange(num_rows), columns)


def both(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    all_rows = torch.arange(batch.slots.shape[0])
    filters = [(feature, all_rows) for feature in FILTERS]
    return [sample(batch, filters), reference.sample(batch, filters)]


def support(logits: list[float], num_samples: int = 400, **settings: float) -> list[set[int]]:
    """Returns which tokens the kernel and the reference ever sample."""
    batch = batch_of(torch.tensor([logits] * num_samples, dtype=torch.float32), **settings)
    return [set(tokens.tolist()) for tokens, _ in both(batch)]


def random_settings(num_rows: int, vocab_size: int) -> dict[str, list[float]]:
    """Each filter on for about half the rows, in all combinations."""

    def some(values: Tensor, off: float) -> list[float]:
        return torch.where(torch.rand(num_rows) < 0.5, values, torch.full_like(values, off)).tolist()

    return {
        "temperature": some(torch.rand(num_rows) * 2 + 0.05, 1.0),
        "min_p": some(torch.rand(num_rows) ** 4, 0.0),
        "top_k": [int(k) for k in some((vocab_size * torch.rand(num_rows) ** 3).floor() + 1, 0.0)],
        "top_p": some(torch.rand(num_rows) * 0.98 + 0.01, 1.0),
        "seed": torch.randint(-(2**62), 2**62, (num_rows,)).tolist(),
    }


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 1000, 5003])
def test_kernel_and_reference_sample_the_same_tokens(vocab_size, spread):
    logits = torch.randn(48, vocab_size) * spread + 3.0
    fast, plain = both(batch_of(logits, **random_settings(48, vocab_size)))
    assert fast[0].tolist() == plain[0].tolist()
    assert not fast[1].any()
    assert not plain[1].any()


def test_kernel_and_reference_agree_where_many_logits_are_minus_infinity():
    logits = torch.randn(96, 700).masked_fill(torch.rand(96, 700) < 0.9, -INF)
    fast, plain = both(batch_of(logits, **random_settings(96, 700)))
    assert fast[0].tolist() == plain[0].tolist()


def test_kernel_and_reference_agree_where_logits_come_in_few_values():
    logits = torch.randint(0, 4, (96, 700)).float()
    fast, plain = both(batch_of(logits, **random_settings(96, 700)))
    assert fast[0].tolist() == plain[0].tolist()


def test_the_kernel_only_reads_the_logits():
    logits = torch.randn(8, 300)
    before = logits.clone()
    sample(batch_of(logits, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01), [])
    assert torch.equal(logits, before)


def test_greedy_is_the_first_of_the_largest_logits():
    logits = torch.full((3, 500), -2.0)
    logits[0, [77, 400]] = 5.0
    logits[1, 499] = -1.0
    logits[2] = -0.0
    logits[2, 130] = 0.0  # equal to -0
    for tokens, _ in both(batch_of(logits, temperature=0.0)):
        assert tokens.tolist() == [77, 499, 0]


def test_greedy_equals_argmax_on_random_logits():
    logits = torch.randn(50, 3001) * 5
    for tokens, _ in both(batch_of(logits, temperature=0.0)):
        assert torch.equal(tokens, logits.argmax(dim=1))


def test_top_k_keeps_lower_ids_of_equal_logits():
    assert support([1.0, 2.0, 1.0, 1.0, 2.0], top_k=3) == [{0, 1, 4}] * 2


def test_top_p_keeps_lower_ids_of_equal_logits():
    assert support([0.0] * 8, top_p=0.5) == [{0, 1, 2, 3}] * 2


def test_top_p_keeps_the_token_that_crosses_the_share():
    assert support([0.0] * 8, top_p=0.51) == [{0, 1, 2, 3, 4}] * 2


def test_min_p_of_one_keeps_all_that_equal_the_likeliest():
    assert support([3.0, 1.0, 3.0, 2.9, 3.0], min_p=1.0) == [{0, 2, 4}] * 2


def test_top_k_of_one_keeps_one():
    assert support([0.0, 0.5, 0.5, 0.4], top_k=1) == [{1}] * 2


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert support([0.0, 0.1, 0.2], top_k=10**9) == [{0, 1, 2}] * 2


def test_a_tiny_top_p_keeps_one():
    assert support([0.0, 0.5, 0.5, 0.4], top_p=1e-9) == [{1}] * 2


def test_a_top_p_next_to_one_keeps_all_that_matter():
    assert support([0.0, 0.5, 0.5, 0.4], top_p=1.0 - 1e-12) == [{0, 1, 2, 3}] * 2


def test_a_low_temperature_samples_the_likeliest():
    assert support([0.0, 1.0, 0.9], temperature=1e-3) == [{1}] * 2


def test_a_high_temperature_samples_all():
    assert support([-10.0, 0.0, 10.0], temperature=100.0) == [{0, 1, 2}] * 2


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_huge_logits_leave_only_the_likeliest(size):
    assert support([-size, size, 0.0, -INF], top_p=0.9) == [{1}] * 2
    assert support([-size, size, 0.0, -INF], top_k=3) == [{1}] * 2
    assert support([-size, size, 0.0, -INF], temperature=2.0) == [{1}] * 2


def test_logits_far_from_zero_are_sampled_by_their_differences():
    assert support([-1e4, -1e4 + 0.5, -2e4]) == [{0, 1}] * 2
    assert support([1e4, 1e4 + 0.5, 0.0], top_p=0.99) == [{0, 1}] * 2


def test_minus_infinity_is_never_sampled():
    assert support([-INF, 0.0, -INF, 0.0, -INF]) == [{1, 3}] * 2
    assert support([-INF, 0.0, -INF, 0.0, -INF], top_k=4, top_p=0.999) == [{1, 3}] * 2


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_unusable_rows_are_flagged_and_harm_no_other(settings):
    bad = [[1.0, NAN, 2.0], [-NAN, 1.0, 2.0], [-INF] * 3, [0.0, INF, 1.0], [NAN] * 3]
    good = [0.0, 50.0, -50.0]
    logits = torch.tensor([line for row in bad for line in (row, good)])
    for tokens, flags in both(batch_of(logits, **settings)):
        assert flags.tolist() == [BROKEN, 0] * len(bad)
        assert tokens.tolist() == [0, 1] * len(bad)


def test_a_negative_nan_in_the_middle_of_a_long_row_is_found():
    logits = torch.zeros(1, 1000)
    logits.view(torch.int32)[0, 555] = -0x400000  # the NaN that x86 makes of 0 / 0 has its sign set
    assert logits[0, 555].isnan()
    for _, flags in both(batch_of(logits)):
        assert (flags == BROKEN).all()


def test_an_empty_batch_samples_nothing():
    tokens, flags = sample(batch_of(torch.empty(0, 10)), [])
    assert tokens.shape == flags.shape == (0,)
