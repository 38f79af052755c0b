"""Numbers of a CPU's cache: what its kernels store and read back, against PyTorch's types and the reference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.cache_formats import format_of, put, take_numbers
from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, floats
from headrace.kernels.reference.e3m4 import decode_e3m4, encode_e3m4
from headrace.kernels.reference.fp8 import FP8, FP8_MAX
from tests.kernels.test_e3m4 import CODES, tricky_numbers

HALVES = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)


@kernel(x="pointer", side="pointer", back="pointer", length="integer", size="integer", shift="integer")
def _store_and_read(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    if claim(pointer) == 0:
        put(a.x, a.length, np.float32(1.0), a.side, 1, a.size, a.shift)
        take_numbers(a.side, 1, a.length, a.size, a.shift, floats(a.back), 1)


def stored_and_read(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What lies in a side of this type, and what is read from it, without its factor."""
    side, back = torch.empty(len(x), dtype=dtype), torch.empty(len(x))
    form = format_of(side)
    _store_and_read(x.clone(), side, back, len(x), form.size, form.shift, num_tasks=1)
    return side, back * form.factor


def test_keys_are_rounded_to_e3m4_as_the_reference_rounds_them() -> None:
    x = torch.cat((tricky_numbers(), torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan])))
    side, back = stored_and_read(x, torch.uint8)
    expected = encode_e3m4(x)
    assert torch.equal(decode_e3m4(side), decode_e3m4(expected))
    assert torch.equal(back, decode_e3m4(expected))


def test_values_are_rounded_to_e4m3_as_pytorch_rounds_them() -> None:
    numbers = CODES.view(FP8).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (-500.0, 500.0)]
    x = torch.cat((numbers, middles, *beside, torch.tensor([1e4, -1e4, torch.inf, -torch.inf])))
    side, back = stored_and_read(x, FP8)
    expected = x.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
    assert torch.equal(side.float(), expected)
    assert torch.equal(back, expected)


def test_a_value_that_is_not_a_number_does_not_reach_others() -> None:
    assert stored_and_read(torch.tensor([torch.nan]), FP8)[1].item() == FP8_MAX


def test_float16_is_pytorchs_and_saturates() -> None:
    halves = HALVES[HALVES.isfinite()].float()
    x = torch.cat((halves, halves * (1 + 2**-11), torch.tensor([65519.0, 65520.0, 1e6, -1e6, torch.inf])))
    side, back = stored_and_read(x, torch.float16)
    expected = x.clamp(-65504, 65504).half()
    assert torch.equal(side, expected)
    assert torch.equal(back, expected.float())


def test_float32_stays_as_it_is() -> None:
    x = torch.randn(100)
    side, back = stored_and_read(x, torch.float32)
    assert torch.equal(side, x)
    assert torch.equal(back, x)
