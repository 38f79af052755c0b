"""Masking tokens by one bit each: on a CPU, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference


def random_case(num_rows: int, vocab_size: int, rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(num_rows, vocab_size).to(dtype)
    num_words = -(-(vocab_size + 1) // 32)
    bits = torch.randint(-(2**31), 2**31, (len(rows), num_words), dtype=torch.int32)
    bits[:, ::3] = -1
    bits[:, 1::4] = 0
    return logits, torch.tensor(rows, dtype=torch.int64), bits


def test_the_reference_keeps_what_is_set_and_forbids_the_rest() -> None:
    logits = torch.arange(3 * 40.0).view(3, 40)
    bits = torch.tensor([[0b101, 0b10], [-1, -1]], dtype=torch.int32)
    reference.apply_bitmask(logits, torch.tensor([2, 0]), bits)
    assert logits[2].isfinite().nonzero().flatten().tolist() == [0, 2, 33]
    assert logits[:2].flatten().tolist() == list(range(80))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 320, 5_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_it_matches_its_reference(vocab_size: int, dtype: torch.dtype) -> None:
    logits, rows, bits = random_case(7, vocab_size, [5, 0, 6], dtype)
    expected = logits.clone()
    reference.apply_bitmask(expected, rows, bits)
    ops.apply_bitmask(logits, rows, bits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "vocab_size"),
    [
        pytest.param("cpu", torch.float32, 3_001, marks=pytest.mark.interpreted),
        pytest.param("cpu", torch.float16, 33, marks=pytest.mark.interpreted),
        pytest.param("cuda", torch.float32, 128_256, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 49_153, marks=pytest.mark.gpu),
    ],
)
def test_the_triton_kernel_matches_its_reference(device: str, dtype: torch.dtype, vocab_size: int) -> None:
    from headrace.kernels import gpu

    logits, rows, bits = (x.to(device) for x in random_case(9, vocab_size, [8, 2, 3, 0], dtype))
    expected = logits.clone()
    reference.apply_bitmask(expected, rows, bits)
    gpu.apply_bitmask(logits, rows, bits)
    assert torch.equal(logits, expected)
