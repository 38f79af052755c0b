"""Numbers in e3m4: the reference against their definition, and the GPU's functions against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.e3m4 import E3M4_MAX, decode_e3m4, encode_e3m4
from tests.kernels.places import Place, everywhere

CODES = torch.arange(256, dtype=torch.uint8)
POSITIVE = torch.tensor(
    [(m + 16 * (e > 0)) * 2.0 ** (max(e, 1) - 19) for e in range(8) for m in range(16)],
    dtype=torch.float64,
)


def tricky_numbers() -> Tensor:
    """All numbers of e3m4, the middles between neighbours, the float32 numbers beside these, and random ones."""
    middles = ((POSITIVE[1:] + POSITIVE[:-1]) / 2).float()
    beside = [torch.nextafter(middles, torch.full_like(middles, end)) for end in (0.0, 1.0)]
    spread = torch.rand(1000) * 10.0 ** (-8 * torch.rand(1000))
    found = torch.cat((POSITIVE.float(), middles, *beside, spread * E3M4_MAX))
    return torch.cat((found, -found))


def nearest_even(x: Tensor) -> Tensor:  # [N] within the range -> the bytes
    apart = (x.double().abs()[:, None] - POSITIVE).abs()
    first = apart.argmin(1)  # of two that are as near, the smaller one
    second = (first + 1).clamp(max=127)
    is_tie = apart.gather(1, first[:, None]) == apart.gather(1, second[:, None])
    code = torch.where(is_tie[:, 0] & (first % 2 == 1), second, first)
    return (code + 128 * (x < 0)).to(torch.uint8)


def test_every_byte_is_the_number_that_its_bits_say() -> None:
    assert torch.equal(decode_e3m4(CODES), torch.cat((POSITIVE, -POSITIVE)).float())
    assert float(POSITIVE[-1]) == E3M4_MAX


def test_every_number_is_stored_as_its_byte() -> None:
    assert torch.equal(encode_e3m4(decode_e3m4(CODES[:128])), CODES[:128])
    assert torch.equal(encode_e3m4(decode_e3m4(CODES[129:])), CODES[129:])  # without -0


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    x = tricky_numbers()
    assert torch.equal(encode_e3m4(x), nearest_even(x))


def test_what_is_out_of_range_becomes_the_largest_number() -> None:
    x = torch.tensor([E3M4_MAX * 1.01, 1.0, 3e38, float("inf"), float("nan"), -1.0, float("-inf")])
    assert encode_e3m4(x).tolist() == [0x7F] * 5 + [0xFF] * 2


@everywhere
def test_the_gpu_rounds_and_widens_as_the_reference(place: Place) -> None:
    import triton

    from tests.kernels.e3m4_kernels import encode, widen

    x = torch.cat((tricky_numbers(), torch.tensor([1.0, -3e38, float("inf"), float("nan")]))).to(place.device)
    codes = torch.zeros(len(x), dtype=torch.uint8, device=place.device)
    encode[(triton.cdiv(len(x), 1024),)](x, codes, len(x), BLOCK=1024)
    assert torch.equal(codes, encode_e3m4(x))
    every = CODES.to(place.device)
    wide = torch.zeros(256, dtype=torch.float16, device=place.device)
    widen[(1,)](every, wide, BLOCK=256, IS_INTERPRETED=triton.knobs.runtime.interpret)
    assert torch.equal(wide.float(), decode_e3m4(every))
