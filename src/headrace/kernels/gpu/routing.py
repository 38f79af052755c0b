"""Routes tokens to experts and sorts the routes by expert: two launches, without the host. Few tokens need no order.

Up to 16 tokens are routed by the launch that computes their logits (`few_routes.py`), with the same `choose`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.sort_keys import SHIFTS, key_of, value_of
from headrace.kernels.layout import Routes
from headrace.kernels.reference import choose_experts

RULES = {"sigmoid": 0, "softmax": 1, "softmax_of_chosen": 2, "sigmoid_of_chosen": 3, "sparsemixer": 4}
_BLOCK, _MAX_BLOCK = 1024, 8192
_ROUTES_PER_WARP = 512
_NUMBER_BITS = tl.constexpr(13)  # low bits of a key for the number of its expert
_LAST_NUMBER = tl.constexpr((1 << 13) - 1)


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
            SHIFT=key_shift(logits.dtype, is_corrected=correction is not None),
            RULE=RULES[rule],
            num_warps=1,
            **dependent_launch(device),
        )
    order, ends = sort_routes(chosen, num_experts) if sorts else (chosen[:0], chosen[:0])
    return Routes(weights, order, ends, chosen)


def key_shift(dtype: torch.dtype, *, is_corrected: bool) -> int:
    """How many low bits of a logit, or of a corrected score, are zero as a float32: keys of 16-bit types have 32 bits,
    with the expert's number in place of these; other keys have 64."""
    return 0 if is_corrected or dtype == torch.float32 else SHIFTS[torch.float16]


def sort_routes(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:  # [R] int32
    """Returns the routes in the order of their experts, and where those of each expert end."""
    order, num_routes = torch.empty_like(chosen), chosen.shape[0]
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    block = _MAX_BLOCK if num_routes > _BLOCK else _BLOCK
    launch = dependent_launch(chosen.device)
    _sort[(num_experts,)](chosen, order, ends, num_routes, BLOCK=block, num_warps=block // _ROUTES_PER_WARP, **launch)
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
    SHIFT: tl.constexpr,
    RULE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Chooses the experts of one token."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS_BLOCK)[None, None, :]
    scores = tl.load(logits + token * stride + experts, mask=experts < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    numbers, shares = choose(
        scores, experts, correction, scale, max_distance,
        NUM_EXPERTS, NUM_CHOSEN, CHOSEN_BLOCK, SHIFT, RULE, HAS_CORRECTION,
    )  # fmt: skip
    choices = tl.arange(0, CHOSEN_BLOCK)[None, :]
    place = token * NUM_CHOSEN + choices
    tl.store(chosen + place, numbers, mask=choices < NUM_CHOSEN)
    tl.store(weights + place, shares, mask=choices < NUM_CHOSEN)


@triton.jit
def choose(
    scores,  # [ROWS, CHUNKS, LANES] float32, the logits; -inf past the last expert
    experts,  # the number of each
    correction,
    scale,
    max_distance,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    RULE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
):
    """Chooses the experts of each row, highest logit or corrected score first, of equal ones the one with the lowest
    number. Returns them and their weights, [ROWS, CHOSEN_BLOCK]."""
    left = scores  # what experts are chosen by
    if HAS_CORRECTION:
        if RULE == 0 or RULE == 3:
            left = tl.sigmoid(scores)
        else:
            left = tl.exp(scores - _highest(scores)[:, None, :])
            left = left / _total(left)[:, None, :]
        left += tl.load(correction + experts, mask=experts < NUM_EXPERTS, other=float("-inf"))
    # Score and number in one integer, no two of them equal: one maximum finds both.
    keys = key_of(left, SHIFT)
    if SHIFT == 0:
        keys = keys.to(tl.int64)
        lowest = tl.full(keys.shape, -(1 << 62), tl.int64)
    else:
        lowest = tl.full(keys.shape, -(1 << 31), tl.int32)
    keys = (keys << _NUMBER_BITS) | (_LAST_NUMBER - experts)
    keys = tl.where(experts < NUM_EXPERTS, keys, lowest)
    choices = tl.arange(0, CHOSEN_BLOCK)[None, :]
    bests = tl.zeros([scores.shape[0], CHOSEN_BLOCK], keys.dtype)
    highest = tl.full([scores.shape[0], CHOSEN_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([scores.shape[0], CHOSEN_BLOCK], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        best = _highest(keys)
        is_best = keys == best[:, None, :]
        bests = tl.where(choices == choice, best, bests)
        if HAS_CORRECTION:
            score = _total(tl.where(is_best, scores, 0.0))
            highest = tl.where(choices == choice, score, highest)
        if RULE == 4:
            # Rounded as in the reference: bfloat16 logits are often exactly at the limit.
            top = value_of((best >> _NUMBER_BITS).to(tl.int32), SHIFT)[:, None, :]
            is_near = tl.div_rn(top - scores, tl.maximum(tl.abs(scores), top)) <= max_distance
            share = 1.0 / _total(tl.where(is_near & (keys > lowest), tl.exp(scores - top), 0.0))
            weight = tl.where(choices == choice, share, weight)
        keys = tl.where(is_best, lowest, keys)
    numbers = _LAST_NUMBER - (bests & _LAST_NUMBER).to(tl.int32)
    if not HAS_CORRECTION:
        highest = value_of((bests >> _NUMBER_BITS).to(tl.int32), SHIFT)
        highest = tl.where(choices < NUM_CHOSEN, highest, float("-inf"))
    if RULE == 0:
        weight = tl.sigmoid(highest)
    elif RULE == 3:
        weight = tl.sigmoid(highest)
        weight = weight / tl.sum(weight, axis=1)[:, None]
    elif RULE == 1:
        peak = _highest(scores)
        weight = tl.exp(highest - peak) / _total(tl.exp(scores - peak[:, None, :]))
    elif RULE == 2:
        weight = tl.exp(highest - tl.max(highest, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
    return numbers, weight * scale


@triton.jit
def _highest(values):  # [ROWS, CHUNKS, LANES] -> [ROWS, 1]
    return tl.max(tl.max(values, axis=1), axis=1)[:, None]


@triton.jit
def _total(values):  # [ROWS, CHUNKS, LANES] -> [ROWS, 1]
    return tl.sum(tl.sum(values, axis=1), axis=1)[:, None]


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
