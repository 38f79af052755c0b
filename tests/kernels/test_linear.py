"""Packed linear layers against x @ weight.T in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.cpu import gemm_int8, linear
from headrace.kernels.cpu.panels import IS_SUPPORTED
from headrace.kernels.quantized import (
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from tests.tolerances import assert_linear

SMALL = [(7, 5), (1, 64), (1000, 3), (50, 131)]
SHAPES = [(960, 576), (576, 1536), *SMALL]
NUMS_ROWS = (0, 1, 2, 7, 16, 33, 128, 257)
needs_panels = pytest.mark.skipif(not IS_SUPPORTED, reason="needs an x86 CPU with AVX2")


@pytest.fixture(params=["panels", "transposed"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "transposed":
        monkeypatch.setattr(linear, "IS_SUPPORTED", False)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_a_packed_linear_multiplies_any_number_of_rows(num_out: int, num_in: int, with_bias: bool) -> None:
    weight = torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if with_bias else None
    packed = ops.pack_linear(weight, bias)
    for num_rows in NUMS_ROWS:
        x = torch.randn(num_rows, num_in)
        assert_linear(packed(x), x, weight, bias)


@pytest.mark.usefixtures("_form")
def test_a_packed_linear_takes_rows_that_lie_apart() -> None:
    weight, x = torch.randn(20, 32), torch.randn(9, 64)[:, 32:]
    assert_linear(ops.pack_linear(weight)(x), x, weight)
    assert_linear(ops.pack_linear(weight)(x.t().contiguous().t()), x, weight)


@pytest.mark.usefixtures("_form")
def test_a_packed_linear_does_not_need_its_weight_afterwards() -> None:
    weight = torch.randn(64, 32)
    x, expected_weight = torch.randn(4, 32), weight.clone()
    packed = ops.pack_linear(weight)
    weight.fill_(float("nan"))
    assert_linear(packed(x), x, expected_weight)


def test_bfloat16_weights_multiply_too() -> None:
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    assert_linear(ops.pack_linear(weight)(x), x, weight)


def rounded(x: Tensor) -> Tensor:
    """The rows that INT8 weights are multiplied by: a scale for each chunk of inputs."""
    chunks = [dequantize(quantize_int8(chunk)) for chunk in x.split(gemm_int8.CHUNK, 1)]
    return torch.cat(chunks, 1)


def without_ties(x: Tensor) -> Tensor:
    """Moves inputs that lie between two integers, which one unit in the last place of a quotient decides."""
    scales = torch.cat([chunk.abs().amax(1, keepdim=True).expand_as(chunk) for chunk in x.split(gemm_int8.CHUNK, 1)], 1)
    integers = x / (scales / 127.0)
    is_close = ((integers.frac().abs() - 0.5).abs() < 1e-3) & (x != 0)
    return torch.where(is_close, (integers.trunc() + 0.25 * x.sign()) * (scales / 127.0), x)


@needs_panels
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(100, 576), *SMALL])
def test_int8_weights_multiply_rounded_rows(num_out: int, num_in: int, with_bias: bool) -> None:
    weight = quantize_int8(torch.randn(num_out, num_in))
    bias = torch.randn(num_out) if with_bias else None
    packed = ops.pack_quantized(weight, bias, torch.float32)
    assert isinstance(packed, linear.Int8Linear)
    for num_rows in NUMS_ROWS:
        x = without_ties(torch.randn(num_rows, num_in) * torch.logspace(-3, 3, num_in))
        assert_linear(packed(x), rounded(x), dequantize(weight), bias)


@needs_panels
def test_sums_of_the_largest_int8_values_do_not_saturate() -> None:
    x = torch.ones(3, 1024)
    weight = Int8Weight(torch.full((40, 1024), 127, dtype=torch.int8), torch.ones(40, 1))
    weight.values[20:] = -128
    out = ops.pack_quantized(weight, None, torch.float32)(torch.cat((x, -x)))
    expected = torch.cat((torch.full((20,), 127.0 * 1024), torch.full((20,), -128.0 * 1024)))
    torch.testing.assert_close(out, torch.stack([expected] * 3 + [-expected] * 3))


@needs_panels
def test_a_row_of_zeros_gives_the_bias_and_one_with_nan_gives_nan() -> None:
    bias = torch.randn(30)
    packed = ops.pack_quantized(quantize_int8(torch.randn(30, 200)), bias, torch.float32)
    x = torch.randn(3, 200)
    x[0], x[1, 150], x[2, 199] = 0.0, float("nan"), float("inf")
    out = packed(x)
    assert torch.equal(out[0], bias)
    assert out[1:].isnan().all()


@needs_panels
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_row_has_the_same_result_in_any_batch_and_with_any_number_of_threads(is_int8: bool) -> None:
    weight, x = torch.randn(300, 600), torch.randn(130, 600)
    packed = linear.Int8Linear(quantize_int8(weight)) if is_int8 else linear.PackedLinear(weight)
    whole = packed(x)
    for num_rows in (1, 3, 8, 9, 64, 65):
        assert torch.equal(packed(x[:num_rows]), whole[:num_rows])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(num_threads)


def groups(num_out: int, depth: int, *, bits: int, group_len: int, is_half: bool) -> GroupedWeight:
    """Scales with few digits, whose products with values are exact, in half precision or beyond its range."""
    scales = torch.randn(num_out, depth // group_len).half().float() * (1.0 if is_half else 2.0**-20)
    minima = torch.randn(num_out, depth // group_len).half().float()
    return GroupedWeight(torch.randint(2**bits, (num_out, depth), dtype=torch.uint8), scales, minima, bits)


@needs_panels
@pytest.mark.parametrize("is_half", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("depth", "group_len"), [(576, 32), (320, 16), (384, 128), (1024, 512), (8, 8)])
def test_packed_weights_give_the_results_of_dequantized_ones_to_the_last_bit(
    depth: int, group_len: int, bits: int, is_half: bool
) -> None:
    weight, bias = groups(100, depth, bits=bits, group_len=group_len, is_half=is_half), torch.randn(100)
    packed = ops.pack_quantized(weight, bias, torch.float32)
    assert isinstance(packed, linear.WeightOnlyLinear)
    expected = ops.pack_linear(dequantize(weight), bias)
    for num_rows in (*NUMS_ROWS, 3, 4, 5, 6, 8, 9):
        x = torch.randn(num_rows, depth)
        assert torch.equal(packed(x), expected(x))
        assert_linear(packed(x), x, dequantize(weight), bias)


@needs_panels
def test_packed_weights_take_rows_that_lie_apart_and_any_number_of_threads() -> None:
    weight = groups(300, 256, bits=4, group_len=32, is_half=True)
    packed = ops.pack_quantized(weight, None, torch.float32)
    x = torch.randn(130, 512)[:, 256:]
    whole = packed(x)
    assert torch.equal(whole, packed(x.contiguous()))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(num_threads)


@needs_panels
@pytest.mark.parametrize("has_zeros", [False, True])
def test_four_bit_weights_with_zero_points_and_another_order_of_inputs_multiply(has_zeros: bool) -> None:
    plain = quantize_int4(torch.randn(60, 256), 64, has_zeros=has_zeros)
    weight = Int4Weight(plain.values, plain.scales, plain.zeros, torch.randperm(256))
    for each in (plain, weight):
        packed = ops.pack_quantized(each, None, torch.float32)
        assert isinstance(packed, linear.WeightOnlyLinear)
        for num_rows in (1, 5, 40):
            x = torch.randn(num_rows, 256)
            assert_linear(packed(x), x, dequantize(each))


@needs_panels
def test_groups_that_do_not_divide_into_words_are_dequantized() -> None:
    weight, x = groups(20, 36, bits=4, group_len=12, is_half=True), torch.randn(3, 36)
    packed = ops.pack_quantized(weight, None, torch.float32)
    assert not isinstance(packed, linear.WeightOnlyLinear)
    assert_linear(packed(x), x, dequantize(weight))


def test_weights_that_a_cpu_cannot_multiply_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(30, 64), torch.randn(4, 64)
    fp8, int8 = quantize_fp8(weight), quantize_int8(weight)
    assert_linear(ops.pack_quantized(fp8, None, torch.float32)(x), x, dequantize(fp8))
    monkeypatch.setattr(linear, "IS_SUPPORTED", False)
    assert_linear(ops.pack_quantized(int8, None, torch.float32)(x), x, dequantize(int8))
    four = quantize_int4(weight, 32)
    assert_linear(ops.pack_quantized(four, None, torch.float32)(x), x, dequantize(four))


# The features that the rest of the machine's kernels are compiled without, by the generation of the processor.
OLDER = {"haswell": ("avx512", "vnni"), "skylake-avx512": ("vnni",)}


@needs_panels
@pytest.mark.slow
@pytest.mark.parametrize("processor", OLDER)
def test_the_kernels_of_older_processors_are_right_too(processor: str, tmp_path: Path) -> None:
    features = OLDER[processor]
    code = f"""
from llvmlite import binding
host = binding.get_host_cpu_features()
for name in list(host):
    if any(each in name for each in {features}):
        host[name] = False
binding.get_host_cpu_features = lambda: host
import pytest
from headrace.kernels.cpu import gemm_int8
assert not gemm_int8.HAS_VNNI and gemm_int8.LANES == {8 if processor == "haswell" else 16}
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", {str(Path(__file__))!r}]))
"""
    environment = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
