"""GEMMs with weights of four and eight bits against their references."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.quantized import (
    Fp8BlockLinear,
    Fp8Weight,
    Int4Weight,
    Int8Linear,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from tests.kernels.places import Place, cases, relative_error


def make_int4(place: Place, shape: tuple[int, int], group_len: int, *, has_zeros: bool) -> Int4Weight:
    num_groups = shape[1] // group_len
    zeros = torch.randint(0, 17, (shape[0], num_groups), dtype=torch.uint8, device=place.device) if has_zeros else None
    return Int4Weight(
        torch.randint(0, 16, shape, dtype=torch.uint8, device=place.device),
        torch.rand(shape[0], num_groups, device=place.device) + 0.1,
        zeros,
    )


@cases(
    "num_rows shape group_len has_zeros",
    gpu=[
        (20, (4096, 4096), 128, False),
        (32, (6144, 4096), 128, True),
        (17, (576, 1536), 64, False),
        (33, (1000, 896), 32, True),
        (200, (4096, 14336), 128, False),
        (300, (512, 1024), 512, True),
    ],
    interpreted=[(3, (72, 128), 128, False), (18, (64, 512), 32, True), (18, (40, 192), 64, False)],
)
def test_four_bits_match_the_dequantized_matrix(
    place: Place, num_rows: int, shape: tuple[int, int], group_len: int, has_zeros: bool
) -> None:
    from headrace.kernels.gpu.int4 import Int4Linear

    weight = make_int4(place, shape, group_len, has_zeros=has_zeros)
    bias, x = place.randn(shape[0]), place.randn(num_rows, shape[1])
    found = Int4Linear(weight, bias, place.dtype)(x)
    assert relative_error(found, x.float() @ dequantize(weight).t() + bias.float()) < place.error


@cases("", gpu=[()], interpreted=[()])
def test_split_sums_of_four_bits_repeat_exactly(place: Place) -> None:
    from headrace.kernels.gpu.int4 import Int4Linear

    linear = Int4Linear(make_int4(place, (64, 1024), 128, has_zeros=False), None, place.dtype)
    x = place.randn(18, 1024)
    assert torch.equal(linear(x), linear(x))


@cases("group_len has_zeros", gpu=[(128, False), (32, True)], interpreted=[(128, False), (32, True)])
def test_a_widened_matrix_is_the_dequantized_one(place: Place, group_len: int, has_zeros: bool) -> None:
    from headrace.kernels.gpu.int4 import Int4Linear

    weight = make_int4(place, (40, 192 if group_len < 128 else 256), group_len, has_zeros=has_zeros)
    found = Int4Linear(weight, None, place.dtype).widened()
    assert relative_error(found, dequantize(weight)) < place.error


@cases("", gpu=[()], interpreted=[()])
def test_columns_in_the_order_of_their_groups_multiply_their_own_inputs(place: Place) -> None:
    from headrace.kernels.gpu.int4 import Int4Linear

    plain = make_int4(place, (32, 256), 128, has_zeros=True)
    weight = Int4Weight(plain.values, plain.scales, plain.zeros, torch.randperm(256, device=place.device))
    x = place.randn(3, 256)
    found = Int4Linear(weight, None, place.dtype)(x)
    assert relative_error(found, x.float() @ dequantize(weight).t()) < place.error


@cases("num_rows shape", gpu=[(17, (6144, 4096)), (300, (1000, 576))], interpreted=[(3, (72, 160)), (20, (64, 128))])
def test_int8_matches_its_reference(place: Place, num_rows: int, shape: tuple[int, int]) -> None:
    from headrace.kernels.gpu.scaled_gemm import ScaledLinear

    weight = quantize_int8(torch.randn(shape, device=place.device))
    bias, x = place.randn(shape[0]), place.randn(num_rows, shape[1])
    expected = Int8Linear(weight, bias, place.dtype)(x)
    assert relative_error(ScaledLinear.of(weight, bias, place.dtype)(x), expected) < max(place.error, 1e-3)


@cases("num_rows shape", gpu=[(17, (6144, 4096)), (300, (1000, 1536)), (17, (576, 576))], interpreted=[])
def test_fp8_with_scales_per_block_matches_its_reference(place: Place, num_rows: int, shape: tuple[int, int]) -> None:
    from headrace.kernels.gpu.scaled_gemm import ScaledLinear

    weight = make_blocks(place, shape)
    x = place.randn(num_rows, shape[1])
    expected = Fp8BlockLinear(weight, None, place.dtype)(x)
    assert relative_error(ScaledLinear.of(weight, None, place.dtype)(x), expected) < 0.02


def make_blocks(place: Place, shape: tuple[int, int]) -> Fp8Weight:
    values = quantize_fp8(torch.randn(shape, device=place.device)).values
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), device=place.device) + 0.1
    return Fp8Weight(values, scales)


@pytest.mark.parametrize("group_len", [32, 128])
def test_a_searched_clip_is_no_worse_than_none(group_len: int) -> None:
    weight = torch.randn(16, 256) * torch.logspace(-2, 0, 16)[:, None]
    weight[:, ::32] *= 6
    error = (dequantize(quantize_int4(weight, group_len)) - weight).square().sum()
    scale = weight.unflatten(1, (-1, group_len)).abs().amax(-1, keepdim=True) / 7.5
    plain = ((weight.unflatten(1, (-1, group_len)) / scale).round().clamp(-8, 7) * scale).flatten(1)
    assert error < (plain - weight).square().sum()
