"""GEMMs of few rows with weights of four bits, with the norm before and the activation after, against references."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.gpu import few_rows_int4
from headrace.kernels.gpu.few_rows_int4 import FewRowsTile
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.layout import UnnormedRows
from headrace.kernels.quantized import Int4Weight, dequantize
from tests.kernels.places import Place, cases, everywhere, relative_error

GATED = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}


def weight_of(place: Place, shape: tuple[int, int], group_len: int = 128, *, has_zeros: bool = False) -> Int4Weight:
    num_groups = shape[1] // group_len
    scales = (torch.rand(shape[0], num_groups, device=place.device) + 0.5) * 0.2 * shape[1] ** -0.5
    zeros = torch.randint(0, 17, (shape[0], num_groups), dtype=torch.uint8, device=place.device) if has_zeros else None
    return Int4Weight(torch.randint(0, 16, shape, dtype=torch.uint8, device=place.device), scales, zeros)


def error_of(place: Place, num_rows: int) -> float:
    """More than one row become integers of 16 bits."""
    return place.error if num_rows == 1 else max(place.error, 1e-4)


@cases(
    "num_rows shape group_len has_zeros",
    gpu=[
        (rows, *case)
        for rows in (1, 2, 8, 9, 16)
        for case in (
            ((6144, 4096), 128, False),
            ((4096, 14336), 128, True),
            ((2048, 1024), 64, True),
            ((48, 3072), 32, False),
            ((64, 5120), 32, True),
            ((192, 1408), 128, True),
        )
    ],
    interpreted=[
        (1, (32, 256), 128, False),
        (1, (16, 384), 64, True),
        (1, (16, 1280), 32, True),
        (3, (32, 256), 32, False),
        (12, (16, 1152), 128, True),
        (2, (128, 1152), 128, True),
        (16, (64, 256), 128, False),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_match_the_dequantized_matrix(
    place: Place, num_rows: int, shape: tuple[int, int], group_len: int, has_zeros: bool, has_bias: bool
) -> None:
    weight = weight_of(place, shape, group_len, has_zeros=has_zeros)
    bias, x = place.randn(shape[0]) if has_bias else None, place.randn(num_rows, shape[1])
    expected = x.float() @ dequantize(weight).t() + (0.0 if bias is None else bias.float())
    assert relative_error(Int4Linear(weight, bias, place.dtype)(x), expected) < error_of(place, num_rows)


NORMED = [((6144, 4096), 128), ((512, 5120), 128), ((512, 8192), 256), ((3072, 2048), 128), ((512, 896), 128)]


@cases(
    "num_rows shape group_len",
    gpu=[(rows, *case) for rows in (1, 2, 16) for case in NORMED],
    interpreted=[(1, (32, 256), 128), (1, (16, 1408), 128), (3, (64, 256), 128)],
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_left_to_the_layer_is_the_same_norm(
    place: Place, num_rows: int, shape: tuple[int, int], group_len: int, has_residual: bool
) -> None:
    weight, gain = weight_of(place, shape, group_len), place.randn(shape[1]).float()
    x, residual = place.randn(num_rows, shape[1]), place.randn(num_rows, shape[1]) if has_residual else None
    total = torch.full_like(x, torch.nan) if has_residual else None
    linear = Int4Linear(weight, None, place.dtype)
    assert linear.takes_unnormed(x)

    normed = torch.full_like(x, torch.nan) if num_rows == 1 else None
    found = linear(UnnormedRows(x, residual, total, gain, 1e-6, normed))

    summed = x if residual is None else x + residual
    expected = reference.rms_norm(summed, gain, 1e-6)
    assert relative_error(found, expected.float() @ dequantize(weight).t()) < error_of(place, num_rows)
    assert total is None or torch.equal(total, summed)
    assert normed is None or relative_error(normed, expected) < place.error


@everywhere
def test_the_norm_before_small_groups_is_left_to_its_own_kernel(place: Place) -> None:
    linear = Int4Linear(weight_of(place, (32, 256), 64), None, place.dtype)
    assert not linear.takes_unnormed(place.randn(1, 256))


@cases(
    "num_rows shape group_len",
    gpu=[
        (rows, *case) for rows in (1, 2, 16, 40) for case in (((28672, 4096), 128), ((512, 896), 64), ((96, 512), 32))
    ],
    interpreted=[(1, (64, 256), 128), (3, (32, 256), 64), (9, (32, 128), 32), (5, (128, 640), 128)],
)
@pytest.mark.parametrize("activation", sorted(GATED))
def test_gate_up_and_activation_are_one_operation(
    place: Place, num_rows: int, shape: tuple[int, int], group_len: int, activation: str
) -> None:
    weight, x = weight_of(place, shape, group_len), place.randn(num_rows, shape[1])
    found = Int4Linear(weight, None, place.dtype).gated(x, activation)
    expected = GATED[activation]((x.float() @ dequantize(weight).t()).to(place.dtype))
    assert found.shape == expected.shape
    assert relative_error(found, expected) < 2 * error_of(place, num_rows)


@cases(
    "num_rows shape",
    gpu=[(rows, shape) for rows in (1, 2, 16) for shape in ((28672, 4096), (512, 896))],
    interpreted=[(1, (64, 256)), (2, (128, 256))],
)
def test_norm_gate_up_and_activation_are_one_operation(place: Place, num_rows: int, shape: tuple[int, int]) -> None:
    weight, x, residual = weight_of(place, shape), *(place.randn(num_rows, shape[1]) for _ in range(2))
    gain, total = place.randn(shape[1]).float(), torch.empty_like(x)
    linear = Int4Linear(weight, None, place.dtype)
    found = linear.gated(UnnormedRows(x, residual, total, gain, 1e-6), "silu")
    normed = reference.rms_norm(x + residual, gain, 1e-6)
    expected = reference.silu_and_mul((normed.float() @ dequantize(weight).t()).to(place.dtype))
    assert relative_error(found, expected) < 2 * error_of(place, num_rows)


@cases(
    "num_rows tile",
    gpu=[
        (rows, FewRowsTile(*tile))
        for rows in (2, 4, 16)
        for tile in ((64, 0, 4, 1), (64, 2, 3, 2), (128, 5, 3, 2, 8), (128, 1, 5, 1), (64, 10, 3, 1), (64, 1, 2, 5))
    ],
    interpreted=[
        (2, FewRowsTile(64, 0, 4, 1)),
        (4, FewRowsTile(64, 2, 3, 2)),
        (16, FewRowsTile(128, 5, 3, 2, 8)),
    ],
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_every_tile_gives_the_same_sums(
    place: Place, num_rows: int, tile: FewRowsTile, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = weight_of(place, (128, 1280)), place.randn(num_rows, 1280)  # 10 blocks
    linear = Int4Linear(weight, None, place.dtype)
    monkeypatch.setattr(few_rows_int4, "few_rows_tile", lambda *args, **kwargs: tile)
    expected = x.float() @ dequantize(weight).t()
    if is_gated:
        expected = reference.silu_and_mul(expected.to(place.dtype))
    first, second = (linear.gated(x, "silu") if is_gated else linear(x) for _ in range(2))
    assert relative_error(first, expected) < 2 * error_of(place, num_rows)
    assert torch.equal(first, second)


@everywhere
def test_columns_in_the_order_of_their_groups_multiply_their_own_inputs(place: Place) -> None:
    plain = weight_of(place, (64, 256), has_zeros=True)
    weight = Int4Weight(plain.values, plain.scales, plain.zeros, torch.randperm(256, device=place.device))
    linear, x = Int4Linear(weight, None, place.dtype), place.randn(1, 256)
    assert not linear.takes_unnormed(x)
    assert relative_error(linear(x), x.float() @ dequantize(weight).t()) < place.error


@everywhere
def test_other_shapes_are_left_to_the_other_kernel(place: Place) -> None:
    weight, x = weight_of(place, (40, 192), 64), place.randn(1, 192)
    linear = Int4Linear(weight, None, place.dtype)
    assert not linear.takes_unnormed(x)
    assert relative_error(linear(x), x.float() @ dequantize(weight).t()) < place.error
