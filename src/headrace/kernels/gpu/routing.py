"""Routes tokens to experts and sorts the routes by expert: two launches, without the host. Few tokens need no order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.layout import Routes
from headrace.kernels.reference import choose_experts

_BLOCK = 1024
_RULES = {"sigmoid": 0, "softmax": 1, "softmax_of_chosen": 2, "sigmoid_of_chosen": 3, "sparsemixer": 4}


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
    sorts: bool = True,
) -> Routes:
    """See `ops.route`. Experts in groups are chosen by the reference, which does not use the host either."""
    num_tokens, num_experts = logits.shape
    num_routes, device = num_tokens * num_chosen, logits.device
    chosen = torch.empty(num_routes, dtype=torch.int32, device=device)
    weights = torch.empty(num_routes, dtype=torch.float32, device=device)
    if num_groups_chosen < num_groups:
        groups = (num_groups, num_groups_chosen)
        experts, shares = choose_experts(logits, num_chosen, rule, correction=correction, jitter=jitter, groups=groups)
        chosen, weights = experts.int().flatten(), shares.flatten() * scale
    elif num_tokens:
        _choose_experts[(num_tokens,)](
            logits,
            logits if correction is None else correction,
            chosen,
            weights,
            logits.stride(0),
            scale,
            2.0 * jitter,
            HAS_CORRECTION=correction is not None,
            NUM_EXPERTS=num_experts,
            EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
            NUM_CHOSEN=num_chosen,
            CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
            RULE=_RULES[rule],
            num_warps=1,
            **dependent_launch(device),
        )
    order, ends = sort_routes(chosen, num_experts) if sorts else (chosen[:0], chosen[:0])
    return Routes(weights, order, ends, chosen)


def sort_routes(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:  # [R] int32
    """Returns the routes in the order of their experts, and where those of each expert end."""
    order, num_routes = torch.empty_like(chosen), chosen.shape[0]
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    _sort[(num_experts,)](chosen, order, ends, num_routes, BLOCK=_BLOCK, num_warps=4, **dependent_launch(chosen.device))
    return order, ends


@triton.jit
def _choose_experts(
    logits,
    correction,
    chosen,
    weights,
    stride,
    scale,
    max_distance,
    HAS_CORRECTION: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Chooses the experts of one token, highest logit or corrected score first, and their weights."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS_BLOCK)
    choices = tl.arange(0, CHOSEN_BLOCK)
    scores = tl.load(logits + token * stride + experts, mask=experts < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    peak = tl.max(scores, axis=0)
    left = scores  # what experts are chosen by
    if HAS_CORRECTION:
        if RULE == 0 or RULE == 3:
            left = tl.sigmoid(scores)
        else:
            left = tl.exp(scores - peak) / tl.sum(tl.exp(scores - peak), axis=0)
        left += tl.load(correction + experts, mask=experts < NUM_EXPERTS, other=float("-inf"))
    highest = tl.full([CHOSEN_BLOCK], float("-inf"), tl.float32)
    numbers = tl.zeros([CHOSEN_BLOCK], tl.int32)
    weight = tl.zeros([CHOSEN_BLOCK], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        best = tl.max(left, axis=0)
        at = tl.minimum(tl.argmax(left, axis=0), NUM_EXPERTS - 1)  # a valid expert even if a logit is NaN
        if HAS_CORRECTION:
            best = tl.sum(tl.where(experts == at, scores, 0.0), axis=0)
        highest = tl.where(choices == choice, best, highest)
        numbers = tl.where(choices == choice, at, numbers)
        if RULE == 4:
            # Rounded as in the reference: bfloat16 logits are often exactly at the limit.
            is_near = tl.div_rn(best - scores, tl.maximum(tl.abs(scores), best)) <= max_distance
            share = 1.0 / tl.sum(tl.where(is_near, tl.exp(left - best), 0.0), axis=0)
            weight = tl.where(choices == choice, share, weight)
        left = tl.where(experts == at, float("-inf"), left)
    if RULE == 0:
        weight = tl.sigmoid(highest)
    elif RULE == 3:
        weight = tl.sigmoid(highest)
        weight = weight / tl.sum(weight, axis=0)
    elif RULE == 1:
        weight = tl.exp(highest - peak) / tl.sum(tl.exp(scores - peak), axis=0)
    elif RULE == 2:
        weight = tl.exp(highest - tl.max(highest, axis=0))
        weight = weight / tl.sum(weight, axis=0)
    weight = weight * scale
    place = token * NUM_CHOSEN + choices
    tl.store(chosen + place, numbers, mask=choices < NUM_CHOSEN)
    tl.store(weights + place, weight, mask=choices < NUM_CHOSEN)


@triton.jit(do_not_specialize=["num_routes"])
def _sort(chosen, order, ends, num_routes, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """Writes the routes of one expert, in order, after those of all experts before it."""
    wait_for_inputs(IS_DEPENDENT)
    expert = tl.program_id(0)
    lines = tl.arange(0, BLOCK)
    end = 0
    for start in tl.range(0, num_routes, BLOCK):
        each = tl.load(chosen + start + lines, mask=start + lines < num_routes, other=1 << 30)
        end += tl.sum((each < expert).to(tl.int32), axis=0)
    for start in tl.range(0, num_routes, BLOCK):
        each = tl.load(chosen + start + lines, mask=start + lines < num_routes, other=1 << 30)
        is_ours = (each == expert).to(tl.int32)
        rank = tl.cumsum(is_ours, axis=0) - 1
        tl.store(order + end + rank, start + lines, mask=is_ours > 0)
        end += tl.sum(is_ours, axis=0)
    tl.store(ends + expert, end)
