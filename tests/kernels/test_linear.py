"""Packed linear layers against x @ weight.T in float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import ops
from headrace.kernels.cpu import linear
from tests.tolerances import assert_linear


@pytest.fixture(params=["packed", "transposed"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "transposed":
        monkeypatch.setattr(linear, "pack", lambda weight: None)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (576, 1536), (7, 5), (1, 64), (1000, 3)])
def test_a_packed_linear_multiplies_any_number_of_rows(num_out: int, num_in: int, with_bias: bool) -> None:
    weight = torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    for num_rows in (0, 1, 2, 7, 16, 33, 128, 257):
        x = torch.randn(num_rows, num_in)
        assert_linear(packed(x), x, weight, bias)


@pytest.mark.usefixtures("_form")
def test_a_packed_linear_takes_rows_that_lie_apart() -> None:
    weight, x = torch.randn(20, 32), torch.randn(9, 64)[:, 32:]
    assert_linear(ops.pack_linear(weight)(x), x, weight)


@pytest.mark.usefixtures("_form")
def test_a_packed_linear_does_not_need_its_weight_afterwards() -> None:
    weight = torch.randn(64, 32)
    x, expected_weight = torch.randn(4, 32), weight.clone()
    packed = ops.pack_linear(weight)
    weight.fill_(float("nan"))
    assert_linear(packed(x), x, expected_weight)


def test_a_packing_that_gives_wrong_answers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(11, 13), torch.randn(4, 13)  # a shape that no other test has: the check's result is cached
    monkeypatch.setattr(linear, "multiply", lambda x, packed, shape, bias: x.new_zeros(x.shape[0], shape.shape[0]))
    assert_linear(ops.pack_linear(weight)(x), x, weight)


def test_bfloat16_weights_multiply_too() -> None:
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    assert_linear(ops.pack_linear(weight)(x), x, weight)
