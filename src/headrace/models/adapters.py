"""Linear layers with LoRA adapters: the tables of low-rank matrices beside the weights, and how a step uses them.

A step without adapters runs the plain layer, with all that its device fuses into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.adapters import AdapterLimits
from headrace.kernels import ops
from headrace.kernels.layout import AdapterRows, LowRankWeights, Rows


class LowRankMatrices(NamedTuple):
    down: Tensor  # [r, K]
    up: Tensor  # [rows of the piece, r], as `AdaptedLinear.placed` returns it, with the adapter's scale


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A packed linear layer, and the tables of its adapters. Called without rows of adapters, it is the plain layer."""

    linear: ops.PackedLinear
    names: tuple[str, ...]  # of the matrices that are its pieces, such as model.layers.0.self_attn.q_proj
    weights: LowRankWeights
    row_orders: tuple[Tensor | None, ...]  # how the rows of each matrix were reordered at load; None: not
    factors: tuple[float, ...]  # that each matrix was multiplied by at load

    def prefers_fp8(self, num_rows: int) -> bool:
        return False  # the adapters need the input in its own type

    def __call__(self, x: Rows) -> Tensor:
        return self.linear(x)

    def adapted(self, x: Tensor, rows: AdapterRows) -> Tensor:
        out = self.linear(x)
        ops.add_low_rank(out, x, self.weights, rows)
        return out

    def placed(self, piece: int, up: Tensor) -> Tensor:
        """[rows of the piece, r] -> the same with the order and the factor that the matrix has here."""
        order, factor = self.row_orders[piece], self.factors[piece]
        up = up if order is None else up[order]
        return up if factor == 1.0 else up * factor

    @torch.inference_mode()
    def write(self, index: int, matrices: Mapping[int, LowRankMatrices]) -> None:
        """Makes these the matrices of the adapter at `index`, by piece; other pieces stay as they are without it."""
        weights = self.weights
        weights.down[index].zero_()
        weights.up[index].zero_()
        for piece, (down, up) in matrices.items():
            rank, start = len(down), sum(weights.piece_sizes[:piece])
            weights.down[index, :rank, piece].copy_(down)
            weights.up[index, start : start + len(up), :rank].copy_(up)
        weights.ranks[index].fill_(max((len(down) for down, _ in matrices.values()), default=0))


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
