"""Linear layers and experts of steps with few tokens, against the operations that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.gpu import few_experts
from headrace.kernels.gpu.few_rows import FewRowsLinear, Linear
from headrace.kernels.gpu.fp8_linear import Fp8Linear
from headrace.kernels.gpu.linear import pack_with_copy
from headrace.kernels.gpu.scaled_gemm import ScaledLinear
from headrace.kernels.layout import Fp8Rows, Routes, UnnormedRows
from headrace.kernels.quantized import Fp8Weight, dequantize, quantize_fp8, quantize_int8
from tests.kernels.places import Place, cases, relative_error

GATED = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}
GPU_SHAPES = [(3072, 2048), (2048, 8192), (6144, 4096), (4096, 12288), (512, 896)]


def weight_of(place: Place, num_columns: int, width: int) -> Tensor:
    return place.randn(num_columns, width) * width**-0.5


@cases("num_columns width", gpu=[*GPU_SHAPES, (128_256, 2048)], interpreted=[(32, 256), (16, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_row_is_multiplied_as_by_the_library(place: Place, num_columns: int, width: int, has_bias: bool) -> None:
    weight, x = weight_of(place, num_columns, width), place.randn(1, width)
    bias = place.randn(num_columns) if has_bias else None
    found = Linear(weight, bias)(x)
    assert relative_error(found, reference.PackedLinear(weight, bias)(x)) < place.error


@cases(
    "num_rows num_columns width",
    gpu=[(rows, *shape) for rows in (2, 5, 16) for shape in GPU_SHAPES],
    interpreted=[(3, 32, 256), (16, 16, 384)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_are_multiplied_as_by_the_library(
    place: Place, num_rows: int, num_columns: int, width: int, has_bias: bool
) -> None:
    weight, x = weight_of(place, num_columns, width), place.randn(num_rows, width)
    bias = place.randn(num_columns) if has_bias else None
    found, again = (Linear(weight, bias)(x) for _ in range(2))
    assert relative_error(found, reference.PackedLinear(weight, bias)(x)) < place.error
    assert torch.equal(found, again)


@cases("num_columns width", gpu=GPU_SHAPES, interpreted=[(32, 256), (16, 384)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_left_to_the_linear_layer_is_the_same_norm(
    place: Place, num_columns: int, width: int, has_residual: bool
) -> None:
    weight, x, gain = weight_of(place, num_columns, width), place.randn(1, width), place.randn(width).float()
    residual = place.randn(1, width) if has_residual else None
    total = torch.full_like(x, torch.nan) if has_residual else None
    linear = Linear(weight, None)
    assert linear.takes_unnormed(x)

    normed = torch.full_like(x, torch.nan)
    found = linear(UnnormedRows(x, residual, total, gain, 1e-6))
    again = linear(UnnormedRows(x, residual, total, gain, 1e-6, normed))

    summed = x if residual is None else x + residual
    expected = reference.rms_norm(summed, gain, 1e-6)
    assert relative_error(found, reference.PackedLinear(weight)(expected)) < place.error
    assert total is None or torch.equal(total, summed)
    assert torch.equal(again, found)
    assert relative_error(normed, expected) < place.error


@cases(
    "num_rows num_columns width",
    gpu=[(rows, *shape) for rows in (1, 2, 16) for shape in ((16384, 2048), (24576, 4096), (512, 896))],
    interpreted=[(1, 256, 256), (3, 256, 128)],
)
@pytest.mark.parametrize("activation", sorted(GATED))
def test_gate_up_and_activation_are_one_operation(
    place: Place, num_rows: int, num_columns: int, width: int, activation: str
) -> None:
    weight, x = weight_of(place, num_columns, width), place.randn(num_rows, width)
    found = Linear(weight, None).gated(x, activation)
    expected = GATED[activation](reference.PackedLinear(weight)(x))
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 2 * place.error


@cases("num_columns width", gpu=[(16384, 2048), (24576, 4096)], interpreted=[(256, 256)])
def test_norm_gate_up_and_activation_are_one_operation(place: Place, num_columns: int, width: int) -> None:
    weight, x, residual = weight_of(place, num_columns, width), place.randn(1, width), place.randn(1, width)
    gain, total = place.randn(width).float(), torch.empty_like(x)
    found = Linear(weight, None).gated(UnnormedRows(x, residual, total, gain, 1e-6), "silu")
    normed = reference.rms_norm(x + residual, gain, 1e-6)
    assert relative_error(found, reference.silu_and_mul(reference.PackedLinear(weight)(normed))) < 2 * place.error


KINDS = ("int8", "fp8", "fp8 in blocks")


def eight_bits(place: Place, kind: str, num_columns: int, width: int) -> tuple[FewRowsLinear, Tensor]:
    return of_eight_bits(place, kind, torch.randn(num_columns, width, device=place.device) * width**-0.5)


def of_eight_bits(place: Place, kind: str, weight: Tensor) -> tuple[FewRowsLinear, Tensor]:
    """A layer with these weights in eight bits, and their values."""
    num_columns, width = weight.shape
    if kind == "int8":
        int8 = quantize_int8(weight)
        return ScaledLinear.of(int8, None, place.dtype), dequantize(int8)
    fp8 = quantize_fp8(weight)
    if kind == "fp8":
        return Fp8Linear.of(Fp8Rows(fp8.values, fp8.scales), None, place.dtype), dequantize(fp8)
    scales = torch.rand(-(-num_columns // 128), -(-width // 128), device=place.device) * 0.01 + 0.001
    blocks = Fp8Weight((100 * weight).to(torch.float8_e4m3fn), scales)
    return ScaledLinear.of(blocks, None, place.dtype), dequantize(blocks)


def error_of(place: Place, kind: str) -> float:
    """Rows become sums of two values in the weights' type. The interpreter rounds FP8 values wrongly."""
    if kind == "int8":
        return max(place.error, 1e-4)
    return max(place.error, 3e-3 if place.device == "cuda" else 0.02)


@cases(
    "num_rows num_columns width",
    gpu=[(rows, *shape) for rows in (1, 2, 5, 16) for shape in GPU_SHAPES],
    interpreted=[(1, 192, 384), (3, 192, 384), (16, 64, 512)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_keep_their_type_with_weights_in_eight_bits(
    place: Place, kind: str, num_rows: int, num_columns: int, width: int
) -> None:
    linear, weight = eight_bits(place, kind, num_columns, width)
    x = place.randn(num_rows, width)
    found, again = linear(x), linear(x)
    assert not linear.prefers_fp8(num_rows)
    assert relative_error(found, x.float() @ weight.t()) < error_of(place, kind)
    assert torch.equal(found, again)


@cases(
    "num_rows num_columns width",
    gpu=[(rows, *shape) for rows in (1, 2, 16) for shape in ((16384, 2048), (24576, 4096), (512, 896), (384, 256))],
    interpreted=[(1, 384, 256), (3, 384, 256)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gate_up_and_activation_are_one_operation_with_weights_in_eight_bits(
    place: Place, kind: str, num_rows: int, num_columns: int, width: int
) -> None:
    linear, weight = eight_bits(place, kind, num_columns, width)
    x = place.randn(num_rows, width)
    found = linear.gated(x, "silu")
    expected = reference.silu_and_mul((x.float() @ weight.t()).to(place.dtype))
    assert relative_error(found, expected) < 2 * error_of(place, kind)


@cases("num_rows", gpu=[(1,), (16,), (17,)], interpreted=[(1,), (3,), (17,)])
def test_few_rows_take_the_copy_in_int8(place: Place, num_rows: int) -> None:
    num_columns, width = (128_256, 2048) if place.device == "cuda" else (192, 256)
    weight, x, bias = weight_of(place, num_columns, width), place.randn(num_rows, width), place.randn(num_columns)
    head, num_bytes = pack_with_copy(weight, bias)
    assert num_bytes == num_columns * (width + 4)
    weights = [dequantize(quantize_int8(weight)), weight.float()]
    taken, other = weights if num_rows <= 16 else reversed(weights)
    error = relative_error(head(x), torch.nn.functional.linear(x.float(), taken, bias.float()))
    assert error < error_of(place, "int8")
    assert relative_error(head(x), torch.nn.functional.linear(x.float(), other, bias.float())) > 2 * error


def test_a_matrix_that_few_rows_cannot_take_has_no_copy() -> None:
    head, num_bytes = pack_with_copy(torch.randn(100, 576), None)
    assert isinstance(head, Linear)
    assert num_bytes == 0


@cases("width", gpu=[(1024,), (16384,)], interpreted=[(16384,)])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_equal_signs_do_not_overflow(place: Place, kind: str, width: int) -> None:
    """Of the largest values: integers of eight bits times integers of 16 bits."""
    linear, weight = of_eight_bits(place, kind, torch.ones(64, width, device=place.device))
    x = torch.ones(2, width, dtype=place.dtype, device=place.device)
    assert relative_error(linear(x), x.float() @ weight.t()) < error_of(place, kind)


@cases("num_rows", gpu=[(1,), (2,), (16,)], interpreted=[(1,), (3,)])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_left_to_a_layer_with_weights_in_eight_bits(
    place: Place, kind: str, has_residual: bool, num_rows: int
) -> None:
    linear, weight = eight_bits(place, kind, 384, 384)
    x, gain = place.randn(num_rows, 384), place.randn(384).float()
    residual = place.randn(num_rows, 384) if has_residual else None
    total = torch.full_like(x, torch.nan) if has_residual else None
    assert linear.takes_unnormed(x)
    found = linear(UnnormedRows(x, residual, total, gain, 1e-6))
    gated = linear.gated(UnnormedRows(x, residual, total, gain, 1e-6), "silu")
    summed = x if residual is None else x + residual
    expected = reference.rms_norm(summed, gain, 1e-6).float() @ weight.t()
    assert relative_error(found, expected) < error_of(place, kind)
    assert relative_error(gated, reference.silu_and_mul(expected.to(place.dtype))) < 2 * error_of(place, kind)
    assert total is None or torch.equal(total, summed)


@cases(
    "num_tokens num_experts num_chosen hidden_size width",
    gpu=[(1, 128, 8, 2048, 768), (4, 128, 8, 2048, 768), (3, 8, 2, 4096, 1408), (2, 60, 4, 2048, 1408)],
    interpreted=[(2, 5, 3, 128, 128)],
)
def test_experts_of_few_tokens_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, hidden_size: int, width: int
) -> None:
    up = place.randn(num_experts, 2 * width, hidden_size) * hidden_size**-0.5
    down = place.randn(num_experts, hidden_size, width) * width**-0.5
    x = place.randn(num_tokens, hidden_size)
    logits = place.randn(num_tokens, num_experts)
    routes = reference.route(logits, num_chosen, "softmax_of_chosen")
    chosen, _ = reference.choose_experts(logits, num_chosen, "softmax_of_chosen", correction=None)
    assert few_experts.takes(up, down, num_tokens, "silu")

    with_chosen = Routes(routes.weights, routes.order, routes.ends, chosen.flatten().int())
    found = few_experts.compute(up, down, x, with_chosen, "silu")

    narrow = reference.silu_and_mul(reference.pack_experts(up)(x, routes))
    expected = reference.pack_experts(down)(narrow, routes, weighs=True).view(num_tokens, num_chosen, -1).sum(1)
    assert relative_error(found, expected) < 2 * place.error
