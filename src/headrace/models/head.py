"""The head of a pooling model: what comes after pooling, in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.models.pooler import HeadActivation

_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A linear layer, its activation, then maybe a norm."""

    weight: Tensor  # [N, K] float32
    bias: Tensor | None  # [N] float32
    activation: HeadActivation
    norm_weight: Tensor | None = None  # [N] float32
    norm_bias: Tensor | None = None
    eps: float = 1e-5

    def __call__(self, x: Tensor) -> Tensor:  # [P, K] -> [P, N]
        out = F.linear(x, self.weight, self.bias)
        if self.activation != "none":
            out = _ACTIVATIONS[self.activation](out)
        if self.norm_weight is None:
            return out
        return F.layer_norm(out, self.norm_weight.shape, self.norm_weight, self.norm_bias, self.eps)


@dataclass(frozen=True, slots=True)
class PoolerHead:
    layers: tuple[HeadLinear, ...]

    def __call__(self, pooled: Tensor) -> Tensor:
        """Maps pooled states [P, H] float32 to the model's outputs [P, N]."""
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled
