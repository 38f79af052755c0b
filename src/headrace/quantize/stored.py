"""Quantized matrices in the layout of compressed-tensors, which transformers and vLLM read too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.quantized import INT4_MIDDLE, Int4Weight, Kind, QuantizedWeight

_PER_WORD = 8  # values of four bits in 32
_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}


def stored_tensors(name: str, weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of a matrix, by name. `dtype`: of four-bit scales, which readers expect in the type of the
    model."""
    stem = name.removesuffix(".weight")
    if not isinstance(weight, Int4Weight):
        return {name: weight.values, f"{stem}.weight_scale": weight.scales}
    assert weight.zeros is not None and weight.order is None
    return {
        f"{stem}.weight_packed": pack_words(weight.values),
        f"{stem}.weight_scale": weight.scales.to(dtype),
        f"{stem}.weight_zero_point": pack_words(weight.zeros.t()).t().contiguous(),
        f"{stem}.weight_shape": torch.tensor(weight.values.shape),
    }


def pack_words(values: Tensor) -> Tensor:  # [N, K] uint8 -> [N, ceil(K / 8)] int32
    """Packs eight consecutive values into a word, the first one into its lowest bits."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % _PER_WORD), value=INT4_MIDDLE)
    shifts = torch.arange(_PER_WORD, device=values.device) * 4
    words = (padded.long().unflatten(1, (-1, _PER_WORD)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def quantization_config(kind: Kind, group_len: int, ignored: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json."""
    number = "float" if kind == "fp8" else "int"
    weights: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": number,
        "symmetric": kind != "int4",
        "strategy": "group" if kind == "int4" else "channel",
        "group_size": group_len if kind == "int4" else None,
        "dynamic": False,
    }
    inputs: dict[str, Any] | None = None
    if kind != "int4":
        inputs = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
