"""Norms, activation and embedding: CPU kernels against their references, and references against PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import ops, reference
from headrace.kernels.cpu import activation, norms
from tests.tolerances import assert_within, sum_tolerance, unit_roundoff

NUM_ROUNDINGS = 16  # of an activation in both implementations, at most
SHAPES = [(1, 576), (128, 576), (33, 2048), (3, 7), (700, 64), (0, 64)]


def test_the_rms_norm_reference_agrees_with_torch() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5)
    )


def test_the_rms_norm_reference_sums_bfloat16_in_float32() -> None:
    x = torch.full((1, 4096), 0.1, dtype=torch.bfloat16)
    out = reference.rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_matches_its_reference(shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(
        norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **sum_tolerance(shape[1])
    )


def test_rms_norm_reads_rows_that_lie_apart() -> None:
    x, weight = torch.randn(6, 3, 32)[:, 1], torch.randn(32)
    torch.testing.assert_close(norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_matches_its_reference_and_updates_the_residual(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(norms.add_rms_norm(x, residual, weight, 1e-6), expected, **sum_tolerance(shape[1]))
    assert torch.equal(residual, expected_residual)


def test_add_rms_norm_updates_a_residual_that_is_a_view() -> None:
    x, backing, weight = torch.randn(4, 32), torch.zeros(4, 64), torch.randn(32)
    out = norms.add_rms_norm(x, backing[:, 32:], weight, 1e-6)
    assert torch.equal(backing[:, 32:], x)
    assert torch.equal(backing[:, :32], torch.zeros(4, 32))
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6))


def test_the_layer_norm_reference_sums_bfloat16_in_float32() -> None:
    x = (100 + torch.randn(3, 4096)).bfloat16()
    out = reference.layer_norm(x, torch.ones(4096), torch.zeros(4096), 0.0)
    assert out.dtype == torch.bfloat16
    # The output has few different values, and each may be rounded up: their mean moves by u times their mean size.
    torch.testing.assert_close(out.float().mean(-1), torch.zeros(3), atol=unit_roundoff(torch.bfloat16), rtol=0)
    torch.testing.assert_close(out.float().std(-1), torch.ones(3), atol=1e-2, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_matches_its_reference(shape: tuple[int, int]) -> None:
    x, weight, bias = 3 + torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    before = x.clone()
    torch.testing.assert_close(
        norms.layer_norm(x, weight, bias, 1e-5),
        reference.layer_norm(x, weight, bias, 1e-5),
        **sum_tolerance(shape[1], size=8.0),  # of x
    )
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_layer_norm_matches_its_reference_and_updates_the_residual(shape: tuple[int, int]) -> None:
    x, residual, weight, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[1]), torch.randn(shape[1])
    expected_residual = residual.clone()
    expected = reference.add_layer_norm(x, expected_residual, weight, bias, 1e-5)
    found = norms.add_layer_norm(x, residual, weight, bias, 1e-5)
    torch.testing.assert_close(found, expected, **sum_tolerance(shape[1], size=8.0))
    assert torch.equal(residual, expected_residual)


def test_layer_norms_take_rows_that_lie_apart() -> None:
    x, weight, bias = torch.randn(6, 3, 32), torch.randn(32), torch.randn(32)
    apart, residual = x[:, 1], x[:, 2]
    torch.testing.assert_close(
        norms.layer_norm(apart, weight, bias, 1e-5), reference.layer_norm(apart, weight, bias, 1e-5)
    )
    total = apart + residual
    found = norms.add_layer_norm(apart, residual, weight, bias, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(found, reference.layer_norm(total, weight, bias, 1e-5))


def test_both_gelus_are_those_of_torch() -> None:
    x = 4 * torch.randn(5, 46)
    assert torch.equal(ops.gelu(x), torch.nn.functional.gelu(x))
    assert torch.equal(ops.gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("shape", [(1, 3072), (128, 3072), (5, 46), (3, 2), (0, 64)])
def test_silu_and_mul_matches_its_reference(shape: tuple[int, int]) -> None:
    gate_up = 4 * torch.randn(shape)
    torch.testing.assert_close(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@settings(deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_silu_is_right_for_any_number(number: float) -> None:
    gate_up = torch.tensor([[number] * 16 + [1.0] * 16])
    torch.testing.assert_close(activation.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), atol=1e-35, rtol=1e-5)


def test_silu_does_not_hide_a_nan() -> None:
    assert activation.silu_and_mul(torch.full((1, 32), float("nan"))).isnan().all()


@pytest.mark.parametrize("shape", [(1, 3072), (128, 3072), (5, 46), (3, 2), (0, 64)])
def test_gelu_tanh_and_mul_matches_its_reference(shape: tuple[int, int]) -> None:
    gate_up = 4 * torch.randn(shape)
    found, expected = activation.gelu_tanh_and_mul(gate_up), reference.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    # 1 + tanh, of which a few roundings are left where tanh is near -1, times gate and up.
    assert_within(found, expected, NUM_ROUNDINGS * unit_roundoff(torch.float32) * (gate * up).abs())


@settings(deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_gelu_is_right_for_any_number(number: float) -> None:
    gate_up = torch.tensor([[number] * 17 + [1.0] * 17])  # one lane more than a register
    found, expected = activation.gelu_tanh_and_mul(gate_up), reference.gelu_tanh_and_mul(gate_up.double()).float()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_gelu_does_not_hide_a_nan() -> None:
    assert activation.gelu_tanh_and_mul(torch.full((1, 34), float("nan"))).isnan().all()


def test_a_soft_cap_bends_numbers_towards_itself_in_place() -> None:
    x = torch.tensor([[-1e30, -3.0, 0.0, 0.01, 3.0, 1e30]])
    expected = 5.0 * torch.tanh(x / 5.0)
    assert ops.soft_cap(x, 5.0) is x
    torch.testing.assert_close(x, expected)


def test_embed_picks_rows_of_the_table() -> None:
    table = torch.randn(10, 4)
    assert torch.equal(ops.embed(torch.tensor([3, 3, 9]), table), table[[3, 3, 9]])
