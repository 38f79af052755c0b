"""How far two results of floating-point arithmetic may differ, derived from the dtype and the length of the sums.

Rounding to a dtype changes a number by a factor of at most 1 + u, where u is half the dtype's epsilon. A sum of n terms
t_i rounds n partial sums, in an order that each implementation chooses. If the terms have random signs, a partial sum
is about norm = sqrt(sum of t_i²) at most, and the roundings, which have random signs too, add up to about

    u · sqrt(n) · norm

for the least accurate order, one term after another. `SAFETY` times that is the bound. The errors of such a sum have a
standard deviation of less than u · sqrt(n) · norm / sqrt(3), so the bound is ten standard deviations. A missing or
wrong term changes the sum by about norm / sqrt(n), thousands of times more than the bound in float32.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

SAFETY = 6.0
ROUNDED_INPUTS_ERROR = 5e-4  # of logits of small models with packed weights, whose GEMMs round inputs to 16 bits
MAX_RELATIVE_ERROR = 1e-2  # of logits: where rounding moves them more, a comparison means little


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def sum_error(num_terms: int, norm: Tensor | float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    """The bound of a sum of terms with this norm, or of many sums."""
    return SAFETY * unit_roundoff(dtype) * math.sqrt(max(1, num_terms)) * norm


def sum_tolerance(num_terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Of results computed from sums of terms that have one sign, or relative to them: norms, weighted means. They are
    wrong by a share of themselves, or of `size`, the largest number that takes part.
    """
    error = sum_error(num_terms, dtype=dtype)
    return {"rtol": error, "atol": error * size}


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Each element has its own bound."""
    assert found.shape == expected.shape
    share = (found.double() - expected.double()).abs() / bound.double()
    share = share.nan_to_num(nan=math.inf).where(found != expected, 0.0)
    if share.numel() and share.max() > 1:
        place = tuple(int(index) for index in torch.unravel_index(share.argmax(), share.shape))
        raise AssertionError(
            f"{int((share > 1).sum())} of {share.numel()} elements are wrong; the worst, at {place}, is "
            f"{found[place].item()!r} instead of {expected[place].item()!r}, {share.max().item():.1f} times the bound"
        )


def assert_linear(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`found` is x @ weight.T + bias, [rows, outputs], summed in float32 and rounded to the dtype of x."""
    wide, wide_weight = x.double(), weight.double()
    terms = (wide**2) @ (wide_weight**2).t()
    expected = wide @ wide_weight.t()
    num_terms = x.shape[-1]
    if bias is not None:
        terms, expected, num_terms = terms + bias.double() ** 2, expected + bias.double(), num_terms + 1
    bound = sum_error(num_terms, terms.sqrt())
    if x.dtype != torch.float32:
        bound += 2 * unit_roundoff(x.dtype) * expected.abs()  # to the next number, or to its neighbour at a tie
    assert found.dtype == x.dtype
    assert_within(found, expected, bound)


def assert_same_but_for_rounded_inputs(found: Tensor, expected: Tensor) -> None:
    """Both are logits of the same weights, packed and dequantized. A wrong scale or row changes them by a tenth or
    more."""
    error = float((found - expected).norm() / expected.norm())
    assert error < ROUNDED_INPUTS_ERROR, error


def assert_logits(found: Tensor, theirs: nn.Module, text: Tensor) -> Tensor:
    """`found` are the logits of transformers' model, [tokens, vocabulary], in float32. Returns the expected ones.

    A GEMM of n terms with rounding is an exact GEMM whose weights differ by factors of about 1 ± u · sqrt(n). So the
    bound is `SAFETY` times the largest change of a logit when all weights are changed that much: models with large
    scores of attention are more sensitive than others.
    """
    with torch.no_grad():
        expected = theirs(text[None]).logits[0]
        changed = copy.deepcopy(theirs)
        longest = max(parameter.shape[-1] for parameter in changed.parameters())
        size = unit_roundoff(torch.float32) * math.sqrt(longest)
        for parameter in changed.parameters():
            parameter.mul_(1 + size * torch.randn_like(parameter))
        change = (changed(text[None]).logits[0] - expected).abs().max().item()
    bound = SAFETY * change
    assert 0 < bound < MAX_RELATIVE_ERROR * expected.std().item()
    assert_within(found, expected, torch.full_like(expected, bound))
    return expected
