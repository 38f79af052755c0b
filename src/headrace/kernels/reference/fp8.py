"""Rows in FP8, each with its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.layout import Fp8Rows

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_rows(x: Tensor) -> Fp8Rows:  # [T, K]
    """Quantizes each row to FP8 with its own scale."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return Fp8Rows((wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)
