"""Mixtures of experts: routes of tokens, and the matrices of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.layout import Fp8Rows, Routes, Rows, UnnormedRows
from headrace.kernels.reference.linear import Fp8Linear, PackedLinear


class PackedExperts:
    """One matrix per expert; experts without routes are skipped."""

    def __init__(self, linears: Sequence[Any], num_columns: int, dtype: torch.dtype) -> None:  # each a PackedLinear
        self._linears = linears
        self.takes_fp8 = isinstance(linears[0], Fp8Linear)
        self._num_columns, self._dtype = num_columns, dtype

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        assert not isinstance(x, UnnormedRows)
        num_routes, num_rows = routes.order.shape[0], (x if isinstance(x, Tensor) else x.values).shape[0]
        routes_per_row = num_routes // num_rows if num_rows else 1
        out = torch.empty(num_routes, self._num_columns, dtype=self._dtype, device=routes.order.device)
        begin = 0
        for linear, end in zip(self._linears, routes.ends.tolist(), strict=True):
            if begin < end:
                chosen = routes.order[begin:end].long()
                results = linear(_rows_at(x, chosen // routes_per_row))
                out[chosen] = (results * routes.weights[chosen, None]).to(self._dtype) if weighs else results
            begin = end
        return out


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    pack = Fp8Linear if as_fp8 else PackedLinear
    return PackedExperts([pack(matrix) for matrix in weight], weight.shape[1], weight.dtype)


def _rows_at(x: Tensor | Fp8Rows, indexes: Tensor) -> Rows:
    return x[indexes] if isinstance(x, Tensor) else Fp8Rows(x.values[indexes], x.scales[indexes])


def route(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E]
    scale: float = 1.0,
    jitter: float = 0.0,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
) -> Routes:
    """Sends each token to the experts of its highest logits, and sorts the routes by expert."""
    groups = (num_groups, num_groups_chosen)
    chosen, weights = choose_experts(logits, num_chosen, rule, correction=correction, jitter=jitter, groups=groups)
    experts = chosen.flatten()
    ends = torch.bincount(experts, minlength=logits.shape[1]).cumsum(0)
    return Routes(weights.flatten() * scale, experts.argsort(stable=True).int(), ends.int())


def choose_experts(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None,
    jitter: float = 0.0,
    groups: tuple[int, int] = (1, 1),  # how many there are, and how many of them each token may choose from
) -> tuple[Tensor, Tensor]:  # [T, num_chosen] twice
    """Returns the experts of each token and the weights of its routes, without their scale."""
    wide = logits.float()
    chosen = _choose(wide, num_chosen, rule, correction, groups)
    highest = wide.gather(-1, chosen)
    if rule == "sparsemixer":
        weights = _sparsemixer_weights(wide, chosen, jitter)
    elif rule in ("sigmoid", "sigmoid_of_chosen"):
        weights = highest.sigmoid()
        if rule == "sigmoid_of_chosen":
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        whole = wide if rule == "softmax" else highest
        weights = (highest - whole.logsumexp(-1, keepdim=True)).exp()
    return chosen, weights


def _choose(
    logits: Tensor, num_chosen: int, rule: str, correction: Tensor | None, groups: tuple[int, int]
) -> Tensor:  # [T, num_chosen]
    scores = logits
    if correction is not None:
        scores = (logits.sigmoid() if rule.startswith("sigmoid") else logits.softmax(-1)) + correction
    num_groups, num_groups_chosen = groups
    if num_groups_chosen < num_groups:
        scores = _within_groups(scores, num_groups, num_groups_chosen, num_best=1 if correction is None else 2)
    return scores.topk(num_chosen, dim=-1).indices


def _within_groups(scores: Tensor, num_groups: int, num_groups_chosen: int, *, num_best: int) -> Tensor:  # [T, E]
    """Hides the experts of all groups but those whose best experts have the highest sum of scores."""
    by_group = scores.unflatten(-1, (num_groups, -1))  # [T, groups, experts of a group]
    best = by_group.topk(num_best, dim=-1).values.sum(-1)
    chosen = best.topk(num_groups_chosen, dim=-1).indices
    is_hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    visible: Tensor = by_group.masked_fill(is_hidden[:, :, None], float("-inf"))
    return visible.flatten(-2)


def _sparsemixer_weights(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:  # [T, num_chosen]
    """The share of each chosen expert among those not chosen before it whose logits are nearly as high."""
    left, weights = logits, []
    for experts in chosen.split(1, dim=-1):
        best = logits.gather(-1, experts)
        is_near = (best - logits) / logits.abs().maximum(best) <= 2 * jitter
        weights.append(1 / (left - best).exp().where(is_near, 0.0).sum(-1, keepdim=True))
        left = left.scatter(-1, experts, float("-inf"))
    return torch.cat(weights, dim=-1)
