"""Moves scales of input channels out of a matrix and into what computes its input, which leaves the model's function
as it is: a matrix's column times s, and the norm's weight (or the row of `up_proj`) before it divided by s.

    int8    SmoothQuant: s balances the largest input of a channel against its largest weight, so that both are easy
            to round with one scale per row
    int4    activation-aware: s is a power of the channel's mean input; the power with the least error of the output on
            recorded inputs is taken
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.quantized import dequantize, quantize_int4
from headrace.models.spec import ModelSpec
from headrace.quantize.calibrate import Inputs, LayerInputs

_BALANCE = 0.5  # of SmoothQuant: 0 leaves the weights as they are, 1 the activations
_POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_MIN_SCALE, _MAX_SCALE = 1e-2, 1e2
ChooseScales = Callable[[list[Tensor], Inputs], Tensor]


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices with one input, and the tensors whose rows or elements compute it."""

    matrices: tuple[str, ...]
    before: tuple[str, ...]
    offset: float  # of a norm's weight: what multiplies is the weight plus this
    inputs: Inputs


def folds_of(spec: ModelSpec, index: int, inputs: LayerInputs) -> list[Fold]:
    """The folds of a layer. What computes the input of `o_proj` is shared by query heads, so it has none."""
    prefix = f"model.layers.{index}."
    found = []
    kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
    has_norms = spec.pre_norms and not spec.is_parallel and not spec.bare_norms
    mlp = ("gate_proj", "up_proj") if spec.is_gated else ("up_proj",)
    if has_norms:
        attention = tuple(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv")
        norm = tuple(f"{prefix}input_layernorm.{kind}" for kind in kinds)
        found.append(Fold(attention, norm, spec.norm_offset, inputs.qkv))
        norm = tuple(f"{prefix}{spec.mlp_norm_name}.{kind}" for kind in kinds)
        found.append(Fold(tuple(f"{prefix}mlp.{name}.weight" for name in mlp), norm, spec.norm_offset, inputs.up))
    if spec.is_gated:  # down reads act(gate) * up, which is linear in up
        kinds = ("weight", "bias") if spec.mlp_bias else ("weight",)
        up = tuple(f"{prefix}mlp.up_proj.{kind}" for kind in kinds)
        found.append(Fold((f"{prefix}mlp.down_proj.weight",), up, 0.0, inputs.down))
    return found


def apply(fold: Fold, tensors: dict[str, Tensor], choose: ChooseScales) -> None:
    """Rescales the layer's tensors in place."""
    scales = choose([tensors[name] for name in fold.matrices], fold.inputs)
    for name in fold.matrices:
        tensors[name] = tensors[name] * scales
    for name in fold.before:
        tensor = tensors[name]
        offset = fold.offset if name.endswith("norm.weight") else 0.0
        by_row = scales.view(-1, *([1] * (tensor.dim() - 1)))
        tensors[name] = (tensor + offset) / by_row - offset


def smooth_scales(matrices: list[Tensor], inputs: Inputs) -> Tensor:  # [K]
    assert inputs.largest is not None
    weights = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0).clamp(min=1e-5)
    largest = inputs.largest.to(weights.device).clamp(min=1e-5)
    return _bounded(largest**_BALANCE / weights ** (1.0 - _BALANCE))


def aware_scales(matrices: list[Tensor], inputs: Inputs, group_len: int) -> Tensor:  # [K]
    matrix = torch.cat(matrices)
    x = inputs.sample().to(matrix.device)
    expected, mean = x @ matrix.t(), x.abs().mean(0).clamp(min=1e-5)
    candidates = [_bounded(mean**power) for power in _POWERS]
    errors = [float((x @ _rounded(matrix, scales, group_len).t() - expected).square().sum()) for scales in candidates]
    return candidates[min(range(len(errors)), key=errors.__getitem__)]


def _rounded(matrix: Tensor, scales: Tensor, group_len: int) -> Tensor:
    """The matrix that is multiplied with the unscaled input, after its scaled form was quantized."""
    return dequantize(quantize_int4(matrix * scales, group_len)) / scales


def _bounded(scales: Tensor) -> Tensor:
    """Keeps the scales near 1, so that norms keep their digits."""
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(_MIN_SCALE, _MAX_SCALE)
