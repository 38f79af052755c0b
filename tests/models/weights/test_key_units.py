"""Units of keys in an FP8 cache, against the keys that the weights give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels.quantized import Kind, quantize
from headrace.kernels.reference.e3m4 import E3M4_MAX
from headrace.models.layers import Norm
from headrace.models.weights.key_units import HEADROOM, units_of_normed, units_of_projected
from headrace.models.weights.reader import Matrix

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 3, 32
SIZES = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
SCALES = torch.tensor([0.05, 1.0, 30.0]).repeat_interleave(HEAD_DIM)  # of the rows of each KV head
KEYS = slice(HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)


def projection() -> Tensor:
    weight = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    weight[KEYS] *= SCALES[:, None]
    return weight


def norm(*, has_bias: bool = False) -> Norm:
    return Norm(4 * torch.rand(HIDDEN), 5 * torch.randn(HIDDEN) if has_bias else None, 1e-6)


def check(units: tuple[float, ...], keys: Tensor) -> None:  # [T, Hkv, D]
    """The largest number is HEADROOM to twice HEADROOM above the root mean square of each head."""
    room = E3M4_MAX * torch.tensor(units) / keys.square().mean((0, 2)).sqrt()
    assert len(units) == KV_HEADS and (room > 0.95 * HEADROOM).all() and (room < 2.1 * HEADROOM).all(), room


def keys_of(weight: Tensor, bias: Tensor | None, of_input: Norm | None) -> Tensor:  # [T, Hkv, D]
    x = torch.randn(2000, HIDDEN)
    if of_input is not None:
        x = x * of_input.weight + (0.0 if of_input.bias is None else of_input.bias)
    keys = x @ weight[KEYS].t() + (0.0 if bias is None else bias[KEYS])
    return keys.unflatten(1, (KV_HEADS, HEAD_DIM))


@pytest.mark.parametrize("has_norm_bias", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_range_fits_keys_of_normed_inputs(has_norm_bias: bool, has_bias: bool) -> None:
    weight, of_input = projection(), norm(has_bias=has_norm_bias)
    bias = torch.zeros(len(weight))
    bias[KEYS.start + 5] = 300.0  # one large dimension, as in Qwen2
    bias = bias if has_bias else None
    units = units_of_projected(Matrix(("qkv",), weight, bias), of_input, **SIZES)
    check(units, keys_of(weight, bias, of_input))


def test_units_are_powers_of_two() -> None:
    units = torch.tensor(units_of_projected(Matrix(("qkv",), projection(), None), norm(), **SIZES))
    assert torch.equal(units, units.log2().round().exp2()) and len(set(units.tolist())) == KV_HEADS


def test_an_input_without_a_norm_is_taken_for_a_normed_one() -> None:
    weight = projection()
    check(units_of_projected(Matrix(("qkv",), weight, None), None, **SIZES), keys_of(weight, None, None))


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantized_weights_have_the_same_units(kind: Kind) -> None:
    weight, of_input = projection(), norm()
    units = units_of_projected(Matrix(("qkv",), quantize(weight, kind), None), of_input, **SIZES)
    check(units, keys_of(weight, None, of_input))


def test_units_of_normed_keys_follow_from_the_gains() -> None:
    gains = 3 * torch.rand(KV_HEADS, HEAD_DIM) * torch.tensor([[0.1], [1.0], [20.0]])
    x = torch.randn(500, KV_HEADS, HEAD_DIM) * 100
    keys = x / x.square().mean(2, keepdim=True).sqrt() * gains
    check(units_of_normed(gains), keys)


def test_keys_of_zeros_have_a_unit_too() -> None:
    units = torch.tensor(units_of_normed(torch.zeros(2, HEAD_DIM)))
    assert (units > 0).all() and units.isfinite().all()
