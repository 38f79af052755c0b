"""Mixtures of experts: routes of tokens, and the matrices of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import Addend, Routes, Rows
from headrace.kernels.ops.activations import GATED
from headrace.kernels.ops.dispatch import kernels_for
from headrace.kernels.ops.linear import PackedLinear
from headrace.kernels.quantized import Fp8Weight, Int4Weight


class PackedExperts(Protocol):
    """One weight matrix per expert, in the form that their device multiplies fastest."""

    @property
    def takes_fp8(self) -> bool: ...

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        """Multiplies each route's row, or its token's row, by the matrix of its expert; then by the route's weight
        if asked."""


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    """Packs the weight matrices of a mixture of experts."""
    kernels = kernels_for(weight.device, weight.dtype)
    packed: PackedExperts = kernels.pack_experts(weight, as_fp8=True) if as_fp8 else kernels.pack_experts(weight)
    return packed


def pack_quantized_experts(
    weight: Fp8Weight | Int4Weight, num_experts: int, dtype: torch.dtype
) -> PackedExperts | None:  # [E * N, K]
    """Packs matrices in FP8 or four bits, expert after expert, on a GPU. A block of FP8 has rows of one expert, and of
    one of its matrices. None: no kernel takes groups of this length."""
    packed: PackedExperts | None = kernels_for(weight.values.device, dtype).pack_quantized_experts(
        weight, num_experts, dtype
    )
    return packed


def experts_of(linears: Sequence[PackedLinear], num_columns: int, dtype: torch.dtype) -> PackedExperts:
    """Returns experts whose matrices are packed already, on a CPU."""
    return reference.PackedExperts(linears, num_columns, dtype)


def gated_experts(up: PackedExperts, x: Tensor, routes: Routes, activation: str) -> Rows:  # [T, K] -> [R, N / 2]
    """Multiplies each route's token by gate and up of its expert, and applies the activation, in the type that a second
    layer of the same kind takes."""
    if x.device.type == "cuda" and not up.takes_fp8 and activation in ("silu", "gelu_tanh"):
        out: Tensor = kernels_for(x.device, x.dtype).gated_experts(up, x, routes, activation)
        return out
    return GATED[activation](up(x, routes), as_fp8=up.takes_fp8)


def sum_routes(x: Addend) -> Tensor:  # -> [T, H]
    """Sums the routes of each token, if they are not summed yet."""
    if isinstance(x, Tensor):
        return x
    if x.rows.device.type == "cuda":
        out: Tensor = kernels_for(x.rows.device, x.rows.dtype).sum_routes(x)
        return out
    return x.rows.view(-1, x.num_chosen, x.rows.shape[1]).sum(1)


def takes_few_tokens(up: PackedExperts, down: PackedExperts, x: Tensor, activation: str) -> bool:
    """Whether `experts_of_few_tokens` computes these experts for rows of this shape."""
    if x.device.type != "cuda":
        return False
    found: bool = kernels_for(x.device, x.dtype).takes_few_tokens(up, down, x, activation)
    return found


def experts_of_few_tokens(
    up: PackedExperts, down: PackedExperts, x: Tensor, routes: Routes, activation: str
) -> Tensor:  # [T, H] -> [T, H]
    """Computes the whole MLP of each route's expert, and sums the weighted results of each token."""
    out: Tensor = kernels_for(x.device, x.dtype).experts_of_few_tokens(up, down, x, routes, activation)
    return out


def multiply_and_route(
    router: PackedLinear,  # [E, K]
    x: Rows,  # [T, K]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E] float32
    scale: float = 1.0,
    jitter: float = 0.0,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
    sorts: bool = True,
) -> Routes:
    """Multiplies by the router, and routes each token by its logits (see `route`)."""
    if isinstance(x, Tensor) and x.device.type == "cuda":
        kernels = kernels_for(x.device, x.dtype)
        if kernels.takes_router(router, x, num_chosen, has_groups=num_groups_chosen < num_groups):
            routes: Routes = kernels.multiply_and_route(
                router, x, num_chosen, rule, correction=correction, scale=scale, jitter=jitter, sorts=sorts
            )
            return routes
    return route(
        router(x),
        num_chosen,
        rule,
        correction=correction,
        scale=scale,
        jitter=jitter,
        num_groups=num_groups,
        num_groups_chosen=num_groups_chosen,
        sorts=sorts,
    )


def route(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E] float32
    scale: float = 1.0,
    jitter: float = 0.0,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
    sorts: bool = True,  # False: `order` and `ends` of the routes may be left empty
) -> Routes:
    """Routes each token to the `num_chosen` experts of its highest logits; with a `correction`, to those of the highest
    scores (sigmoid or softmax of the logits) plus correction. Experts in groups: only those of the groups with the
    highest logit, or with the highest sum of two corrected scores.

    The `rule` gives the routes' weights, which are multiplied by `scale`: the sigmoid of each logit, or its share among
    the chosen ones (sigmoid_of_chosen); its share in the softmax over all experts (softmax), over the chosen ones
    (softmax_of_chosen), or over those not chosen before it whose logits are within 2 * `jitter` of it, relative to the
    larger of the two (sparsemixer)."""
    route = kernels_for(logits.device, logits.dtype).route
    groups = {"num_groups": num_groups, "num_groups_chosen": num_groups_chosen}
    if not sorts:
        groups["sorts"] = False
    routes: Routes = route(logits, num_chosen, rule, correction=correction, scale=scale, jitter=jitter, **groups)
    return routes
