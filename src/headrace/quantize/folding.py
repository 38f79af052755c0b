"""Moves scales of input channels out of a matrix and into what computes its input, which leaves the model's function
as it is: a matrix's column times s, and the norm's weight (or the row of `up_proj`) before it divided by s.

SmoothQuant: s balances the largest input of a channel against its largest weight, so that both are easy to round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.spec import ModelSpec
from headrace.quantize.calibrate import Inputs, LayerInputs

_BALANCE = 0.5  # of SmoothQuant: 0 leaves the weights as they are, 1 the activations
_MIN_SCALE, _MAX_SCALE = 1e-2, 1e2


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


def apply(fold: Fold, tensors: dict[str, Tensor]) -> None:
    """Rescales the layer's tensors in place."""
    scales = smooth_scales([tensors[name] for name in fold.matrices], fold.inputs)
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


def _bounded(scales: Tensor) -> Tensor:
    """Keeps the scales near 1, so that norms keep their digits."""
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(_MIN_SCALE, _MAX_SCALE)
