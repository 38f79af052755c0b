"""The low-rank products of adapters (LoRA) in plain PyTorch. The rows of one adapter are computed
together: one GEMM down to its rank, and one up for each piece of the output."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import AdapterRows, LowRankWeights


def add_low_rank(out: Tensor, x: Tensor, weights: LowRankWeights, rows: AdapterRows) -> None:
    ranks = weights.ranks.tolist()
    for adapter, (start, end) in enumerate(pairwise(rows.starts.tolist())):
        if start == end or ranks[adapter] == 0:
            continue
        if end - start == len(x):  # the order is then that of the rows
            _add(out, x, weights, adapter, ranks[adapter])
            continue
        chosen = rows.order[start:end]
        added = out[chosen]
        _add(added, x[chosen], weights, adapter, ranks[adapter])
        out[chosen] = added


def _add(out: Tensor, x: Tensor, weights: LowRankWeights, adapter: int, rank: int) -> None:  # [M, N], [M, K]
    down, up = weights.down[adapter, :rank], weights.up[adapter, :, :rank]
    small = F.linear(x, down.flatten(0, 1)).view(len(x), rank, -1)  # [M, rank, P]
    sizes = list(weights.piece_sizes)
    for piece, (part, of_piece) in enumerate(zip(out.split(sizes, dim=1), up.split(sizes), strict=True)):
        part.addmm_(small[:, :, piece], of_piece.t())
