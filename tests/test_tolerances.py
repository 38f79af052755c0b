"""The bounds hold for the least accurate order of summation, and catch one wrong term."""

from __future__ import annotations

import pytest
import torch

from tests.tolerances import assert_linear, assert_within, sum_error, sum_tolerance, unit_roundoff

NUM_TERMS = 1536


def in_order(terms: torch.Tensor) -> torch.Tensor:
    """The sums of the columns, one term after another in the terms' own dtype."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def test_sums_of_random_signs_are_within_their_bounds_and_not_far_below() -> None:
    terms = torch.randn(NUM_TERMS, 2000)
    bound, exact = sum_error(NUM_TERMS, terms.double().norm(dim=0)), terms.double().sum(0)
    assert_within(in_order(terms), exact, bound)
    assert_within(terms.sum(0), exact, bound)
    assert ((in_order(terms) - exact).abs() > bound / 100).any()


def test_sums_of_one_sign_are_right_to_a_share_of_themselves() -> None:
    terms = torch.rand(NUM_TERMS, 2000)
    torch.testing.assert_close(in_order(terms), terms.double().sum(0).float(), **sum_tolerance(NUM_TERMS, size=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_that_misses_a_term_is_found(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 64).to(dtype), torch.randn(20, 64).to(dtype)
    found = (x.double() @ weight.double().t()).to(dtype)
    assert_linear(found, x, weight)
    wrong = (x[:, 1:].double() @ weight[:, 1:].double().t()).to(dtype)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_linear(wrong, x, weight)


def test_what_is_no_number_is_within_no_bound() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 elements are wrong; the worst, at \(1,\), is nan"):
        assert_within(torch.tensor([1.0, float("nan")]), torch.ones(2), torch.ones(2))


def test_the_roundoff_is_half_of_epsilon() -> None:
    one = torch.ones((), dtype=torch.bfloat16)
    assert one + unit_roundoff(torch.bfloat16) == one
    assert one + 2.1 * unit_roundoff(torch.bfloat16) > one
