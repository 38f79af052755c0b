"""Allowed tokens and log-probabilities on a GPU, each against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.sampling.allowed_tokens import AllowedTokens
from headrace.sampling.feature import Batch
from headrace.sampling.logprobs import reference_scores
from tests.kernels.places import Place, cases

INF = float("inf")
shapes = cases("num_rows vocab_size", gpu=[(300, 128_256), (50, 5003)], interpreted=[(5, 700), (3, 9001)])


@shapes
def test_what_is_not_allowed_becomes_minus_infinity_and_nothing_else_changes(
    place: Place, num_rows: int, vocab_size: int
) -> None:
    from headrace.kernels.gpu.allowed_tokens import keep_allowed

    logits = place.randn(num_rows, vocab_size)
    logits[0, : vocab_size // 2] = float("nan")
    is_allowed = np.random.default_rng(num_rows).random((num_rows + 2, vocab_size)) < 0.5
    bits = torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little")).to(place.device)
    slots = torch.randperm(num_rows + 2)[:num_rows].to(place.device)
    rows = torch.randperm(num_rows)[: num_rows - 2].to(place.device)
    expected = logits.clone()
    AllowedTokens().apply_reference(Batch(expected, slots, slots, {"allowed_tokens": bits}), rows)
    found = logits.clone()
    keep_allowed(found, rows, slots, bits)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.5, INF, -INF), expected.nan_to_num(0.5, INF, -INF))


@shapes
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_scores_are_those_of_the_reference(place: Place, num_rows: int, vocab_size: int, num_top: int) -> None:
    from headrace.kernels.gpu.scores import scores

    logits = (torch.randn(num_rows, vocab_size, device=place.device) * 4).to(place.dtype).float()
    logits[0] = torch.arange(vocab_size, device=place.device).flip(0) / 500  # all the likeliest in one chunk
    tokens = torch.randint(0, vocab_size, (num_rows,), device=place.device)
    tokens[1] = logits[1].argmax()
    chosen, ranks, top_ids, top_values = scores(logits, tokens, num_top=num_top)
    expected = reference_scores(logits.double(), tokens, num_top=num_top)
    torch.testing.assert_close(chosen.double(), expected.chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top_values.double(), expected.top_values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, expected.ranks)
    assert torch.equal(
        logits.gather(1, top_ids), logits.gather(1, expected.top_ids)
    )  # of equal ones any may come first
    assert all(len(set(ids)) == num_top for ids in top_ids.tolist())


@shapes
def test_of_equally_likely_tokens_the_lower_ids_come_first(place: Place, num_rows: int, vocab_size: int) -> None:
    from headrace.kernels.gpu.scores import scores

    logits = torch.zeros(num_rows, vocab_size, device=place.device)
    logits[1, vocab_size // 2 :] = 1.0
    logits[2, :] = -INF
    logits[2, 3] = 1.0
    tokens = torch.full((num_rows,), 3, device=place.device)
    _, ranks, top_ids, top_values = scores(logits, tokens, num_top=3)
    middle = vocab_size // 2
    assert top_ids[:3].tolist() == [[0, 1, 2], [middle, middle + 1, middle + 2], [3, 0, 1]]
    assert ranks[:3].tolist() == [1, 1 + vocab_size - middle, 1]
    assert top_values[2].tolist() == [0.0, -INF, -INF]


@cases("", gpu=[()], interpreted=[()])
def test_a_row_with_a_nan_has_ids_of_the_vocabulary(place: Place) -> None:
    from headrace.kernels.gpu.scores import scores

    logits = torch.randn(2, 5000, device=place.device)
    logits[0, 4500] = float("nan")
    chosen, _, top_ids, _ = scores(logits, torch.tensor([1, 1], device=place.device), num_top=4)
    assert ((top_ids >= 0) & (top_ids < 5000)).all()
    assert chosen.isnan().tolist() == [True, False]
