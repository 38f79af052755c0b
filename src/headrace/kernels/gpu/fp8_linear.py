"""Linear layers with FP8 weights (see `fp8.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.gpu.few_rows import FewRowsLinear, new_arrivals
from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.layout import Fp8Rows

_MULTIPLE = 16  # both sides of a weight must be a multiple of this for torch._scaled_mm


@dataclass(frozen=True, slots=True)
class Fp8Linear(FewRowsLinear):
    """A linear layer with FP8 weights, one scale per output channel. Up to 16 rows are not rounded to FP8."""

    dtype: torch.dtype = torch.bfloat16  # of the output

    @classmethod
    def of(cls, rows: Fp8Rows, bias: Tensor | None, dtype: torch.dtype) -> Fp8Linear:
        return cls(rows.values, bias, rows.scales.contiguous(), new_arrivals(rows.values), dtype)

    def prefers_fp8(self, num_rows: int) -> bool:
        return not self.takes_few_rows(num_rows)

    def _many_rows(self, x: Tensor | Fp8Rows) -> Tensor:
        assert self.scales is not None
        rows = quantize_rows(x) if isinstance(x, Tensor) else x
        if rows.values.shape[0] == 0:
            return torch.empty((0, self.weight.shape[0]), dtype=self.dtype, device=rows.values.device)
        return torch._scaled_mm(
            rows.values,
            self.weight.t(),
            scale_a=rows.scales,
            scale_b=self.scales.t(),
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )


def can_multiply(shape: torch.Size) -> bool:
    return all(size % _MULTIPLE == 0 for size in shape)
