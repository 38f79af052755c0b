"""Packed linear layers against x @ weight.T in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.cpu import gemm_int8, gemm_weight_only, linear
from headrace.kernels.cpu.panels import IS_SUPPORTED
from headrace.kernels.quantized import (
    OUTER_LEN,
    GroupedWeight,
    Int4Weight,
    Int8Weight,
    dequantize,
    grouped,
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
@pytest.mark.parametrize("kind", ["float32", "int8", "packed"])
def test_a_row_has_the_same_result_in_any_batch_and_with_any_number_of_threads(kind: str) -> None:
    weight, x = torch.randn(300, 576), torch.randn(130, 576)
    packed = {
        "float32": lambda: linear.PackedLinear(weight),
        "int8": lambda: linear.Int8Linear(quantize_int8(weight)),
        "packed": lambda: linear.WeightOnlyLinear(groups(300, 576, bits=4, group_len=32)),
    }[kind]()
    whole = packed(x)
    for num_rows in (1, 3, 8, 9, 64, 65):
        assert torch.equal(packed(x[:num_rows]), whole[:num_rows])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed(x), whole)
    finally:
        torch.set_num_threads(num_threads)


def groups(num_out: int, depth: int, *, bits: int, group_len: int, form: str = "half") -> GroupedWeight:
    """Scales and minima that fit into half precision or do not; or integers times an outer scale."""
    shape = (num_out, depth // group_len)
    values = torch.randint(2**bits, (num_out, depth), dtype=torch.uint8)
    if form == "outer":
        outer = [torch.randn(num_out, depth // OUTER_LEN).half().float() for _ in range(2)]
        outer = [each.repeat_interleave(OUTER_LEN // group_len, 1) for each in outer]
        scales, minima = (each * torch.randint(-128, 128, shape) for each in outer)
        return GroupedWeight(values, scales, minima, bits, *outer)
    scales, minima = (torch.randn(shape).half().float() for _ in range(2))
    return GroupedWeight(values, scales * (2.0**-20 if form == "single" else 1.0), minima, bits)


def symmetric(weight: GroupedWeight, zero: int) -> GroupedWeight:
    return replace(weight, minima=weight.scales * -zero)


def rounded_to_shorts(x: Tensor, weight: GroupedWeight) -> Tensor:
    """The rows that weights of four and eight bits are multiplied by: a factor for each group of inputs."""
    chunks = x.unflatten(1, (-1, gemm_weight_only.group_len_of(weight)))
    top = chunks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    largest = torch.tensor(32767.0)  # a tensor: torch divides a number by multiplying it by a reciprocal
    return ((chunks * (largest / top)).round() * (top / largest)).flatten(1)


def assert_grouped(found: Tensor, x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> None:
    assert_linear(found, rounded_to_shorts(x, weight), dequantize(weight), bias)


@needs_panels
@pytest.mark.parametrize("form", ["half", "single"])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(("depth", "group_len"), [(576, 32), (320, 16), (384, 128), (1024, 512)])
def test_packed_weights_multiply_rows_rounded_to_16_bits(depth: int, group_len: int, bits: int, form: str) -> None:
    weight, bias = groups(100, depth, bits=bits, group_len=group_len, form=form), torch.randn(100)
    for each in (weight, symmetric(weight, 5)):
        packed = ops.pack_quantized(each, bias, torch.float32)
        assert isinstance(packed, linear.WeightOnlyLinear)
        for num_rows in (*NUMS_ROWS, 3, 4, 5, 6, 8, 9):
            x = torch.randn(num_rows, depth)
            assert_grouped(packed(x), x, each, bias)


@needs_panels
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group_len", [16, 32])
def test_packed_scales_may_be_integers_times_an_outer_scale(group_len: int, bits: int) -> None:
    weight = groups(100, 768, bits=bits, group_len=group_len, form="outer")
    for each in (weight, symmetric(weight, 8)):
        packed = ops.pack_quantized(each, None, torch.float32)
        assert isinstance(packed, linear.WeightOnlyLinear)
        for num_rows in (1, 4, 8, 40):
            x = torch.randn(num_rows, 768)
            assert_grouped(packed(x), x, each)


@needs_panels
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_sums_of_the_largest_packed_weights_do_not_overflow(bits: int) -> None:
    largest = torch.full((50, 512), 2**bits - 1, dtype=torch.uint8)
    weight = GroupedWeight(largest, torch.ones(50, 2), torch.zeros(50, 2), bits)
    expected = torch.full((9, 50), 512.0 * (2**bits - 1))
    packed = ops.pack_quantized(weight, None, torch.float32)
    torch.testing.assert_close(packed(torch.ones(9, 512)), expected)
    torch.testing.assert_close(packed(-torch.ones(9, 512)), -expected)


@needs_panels
def test_a_row_with_nan_or_an_infinity_gives_no_numbers_and_one_of_zeros_the_bias() -> None:
    bias = torch.randn(30)
    packed = ops.pack_quantized(groups(30, 64, bits=4, group_len=32), bias, torch.float32)
    for num_rows in (4, 12):
        x = torch.randn(num_rows, 64)
        x[0], x[1, 50], x[2, 63] = 0.0, float("nan"), float("inf")
        out = packed(x)
        assert torch.equal(out[0], bias)
        assert not out[1:3].isfinite().any()
        assert out[3:].isfinite().all()


@needs_panels
def test_packed_weights_take_rows_that_lie_apart_and_any_number_of_threads() -> None:
    weight = groups(300, 256, bits=4, group_len=32)
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
            inputs = x if each.order is None else x[:, each.order]
            assert_grouped(packed(x), inputs, grouped(each))


@needs_panels
def test_groups_that_do_not_divide_into_vectors_are_dequantized() -> None:
    weight, x = groups(20, 36, bits=4, group_len=12), torch.randn(3, 36)
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


@needs_panels
@pytest.mark.skipif(sys.platform != "linux", reason="the settings of glibc's malloc")
def test_gemms_use_no_memory_that_they_have_freed() -> None:
    """Reading or writing it ends the process: it is so large that `free` gives it back to the system at once."""
    code = """
import torch
from headrace.kernels import ops
from headrace.kernels.quantized import quantize_int4, quantize_int8
weight = torch.randn(8, 65536)
for quantize in (quantize_int4, quantize_int8):
    packed = ops.pack_quantized(quantize(weight), None, torch.float32)
    for num_rows in (1, 8, 64):
        assert packed(torch.randn(num_rows, 65536)).isfinite().all()
"""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# The features that the rest of the machine's kernels are compiled without, by the generation of the processor.
OLDER = {"haswell": ("avx512", "vnni"), "skylake-avx512": ("vnni",)}


@needs_panels
@pytest.mark.slow
@pytest.mark.parametrize("processor", OLDER)
def test_the_kernels_of_older_processors_are_right_too(processor: str, tmp_path: Path) -> None:
    features = OLDER[processor]
    files = [
        str(Path(__file__).with_name(f"test_{name}.py")) for name in ("linear", "attention", "rope", "cache_formats")
    ]
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
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *{files}]))
"""
    environment = os.environ | {"NUMBA_CPU_NAME": processor, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
