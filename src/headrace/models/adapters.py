"""Linear layers with LoRA adapters: the tables of low-rank matrices beside the weights, and how a step uses them.

A step without adapters runs the plain layer, with all that its device fuses into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.adapters import AdapterLimits
from headrace.kernels import ops
from headrace.kernels.layout import AdapterRows, LowRankWeights, Rows


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A packed linear layer, and the tables of its adapters. Called without rows of adapters, it is the plain layer."""

    linear: ops.PackedLinear
    names: tuple[str, ...]  # of the matrices that are its pieces, such as model.layers.0.self_attn.q_proj
    weights: LowRankWeights
    row_orders: tuple[Tensor | None, ...]  # how the rows of each matrix were reordered at load; None: not
    factors: tuple[float, ...]  # that each matrix was multiplied by at load

    @property
    def takes_fp8(self) -> bool:
        return False  # the adapters need the input in its own type

    def __call__(self, x: Rows) -> Tensor:
        return self.linear(x)

    def adapted(self, x: Tensor, rows: AdapterRows) -> Tensor:
        out = self.linear(x)
        ops.add_low_rank(out, x, self.weights, rows)
        return out

    @torch.inference_mode()
    def write(self, index: int, piece: int, down: Tensor, up: Tensor) -> None:
        """Fills in one matrix of the adapter at `index`: [r, K] and [rows of the piece, r], with its scale."""
        rank, sizes = len(down), self.weights.piece_sizes
        start = sum(sizes[:piece])
        order, factor = self.row_orders[piece], self.factors[piece]
        up = up if order is None else up[order.to(up.device)]
        self.weights.down[index, :rank, piece].copy_(down)
        self.weights.up[index, start : start + sizes[piece], :rank].copy_(up if factor == 1.0 else up * factor)
        self.weights.ranks[index] = max(rank, int(self.weights.ranks[index]))

    @torch.inference_mode()
    def clear(self, index: int) -> None:
        """Leaves the adapter at `index` without effect."""
        self.weights.down[index].zero_()
        self.weights.up[index].zero_()
        self.weights.ranks[index] = 0


def empty_weights(
    piece_sizes: tuple[int, ...], width: int, limits: AdapterLimits, dtype: torch.dtype, device: torch.device
) -> LowRankWeights:
    """Tables of adapters without effect, for a layer [sum of piece_sizes, width]."""
    num, rank = limits.max_loras, limits.max_rank
    return LowRankWeights(
        down=torch.zeros(num, rank, len(piece_sizes), width, dtype=dtype, device=device),
        up=torch.zeros(num, sum(piece_sizes), rank, dtype=dtype, device=device),
        ranks=torch.zeros(num, dtype=torch.int32, device=device),
        piece_sizes=piece_sizes,
    )


def in_step(linear: ops.PackedLinear, rows: AdapterRows | None) -> ops.PackedLinear:
    """The layer as a step sees it: the plain one, if no row of the step has an adapter."""
    return linear.linear if rows is None and isinstance(linear, AdaptedLinear) else linear


def multiply(linear: ops.PackedLinear, x: Rows, rows: AdapterRows | None) -> Tensor:
    """Runs a linear layer, with the adapters of its rows."""
    if rows is None or not isinstance(linear, AdaptedLinear):
        return in_step(linear, rows)(x)
    assert isinstance(x, Tensor)
    return linear.adapted(x, rows)
