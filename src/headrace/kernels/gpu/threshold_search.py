"""Finds a row's threshold by a search that always ends, however many logits are equal; for rows that `thresholds` left.

Logits are compared as integers of the same order. One program searches one row. Each pass compares the logits with
PIVOTS integers at once: the number of logits above each pivot, and their weight, tell between which two pivots the
threshold lies. A pass finds four bits; the search ends early when only one logit is left between the two pivots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.sort_keys import SHIFTS, key_from, key_of, value_of
from headrace.kernels.gpu.threshold_types import Filters, Thresholds

PIVOTS = 16
BLOCK = 512  # logits that a program compares with all pivots at once


def search_thresholds(
    logits: Tensor,  # [R, V]
    slots: Tensor,  # [R] int32 or int64, the slot of each row
    weights: Tensor,  # [R, num_chunks, 2] float32, see sample.weigh
    temperature: Tensor,  # [num_slots] float64; 0 is greedy
    filters: Filters,
    thresholds: Thresholds,  # in and out
) -> None:
    """Searches the thresholds that are NaN."""
    num_rows, vocab_size = logits.shape
    num_chunks = weights.shape[1]
    _search_thresholds[(num_rows,)](
        logits,
        slots,
        weights,
        temperature,
        filters.min_p,
        filters.top_k,
        filters.top_p,
        thresholds.values,
        thresholds.last_ids,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        SHIFT=SHIFTS[logits.dtype],
        PIVOTS=PIVOTS,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit
def _measure(
    at,
    vocab_size,
    best,
    scale,
    low,
    step,
    HAS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the logits with at least each pivot's key, and if wanted their weight relative to the best; [PIVOTS]."""
    pivots = low + step * tl.arange(0, PIVOTS).to(tl.int64)
    pivots = tl.minimum(pivots, 0x7FFFFFFF).to(tl.int32)
    counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
    masses = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        logit = tl.load(at + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        key = tl.where(inside, key_of(logit, SHIFT), -0x80000000)
        reaches = key[:, None] >= pivots[None, :]
        counts += reaches.to(tl.int32)
        if HAS_MASS:
            weight = tl.exp2((logit - best) * scale)
            masses += tl.where(reaches, weight[:, None], 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _at(values, pivot, PIVOTS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, PIVOTS) == pivot, values, 0))


@triton.jit
def _search(
    at,
    vocab_size,
    best,
    scale,
    low,
    high,
    target,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the highest key in [low, high] such that the logits from it upwards reach the target, in number or in mass.

    Returns the range that is left (one key, or one logit), how many logits lie from it upwards, and how many and with
    what mass (by mass only) above it. By number, the search stops where all logits from `low` upwards are fewer than
    the target.
    """
    count, count_above = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0.0, tl.float32)
    continues = tl.full([], 1, tl.int32)
    while continues > 0:
        step = (high - low) // PIVOTS + 1
        counts, masses = _measure(at, vocab_size, best, scale, low, step, BY_MASS, SHIFT, PIVOTS, BLOCK)
        if BY_MASS:
            pivot = tl.sum((masses >= target).to(tl.int32)) - 1
        else:
            pivot = tl.sum((counts >= target).to(tl.int32)) - 1
        is_short = pivot < 0
        pivot = tl.maximum(pivot, 0)
        count = _at(counts, pivot, PIVOTS)
        next_low = low + step * (pivot + 1).to(tl.int64)
        is_inner = (pivot + 1 < PIVOTS) & (next_low <= high)
        count_above = tl.where(is_inner, _at(counts, pivot + 1, PIVOTS), count_above)
        mass_above = tl.where(is_inner, _at(masses, pivot + 1, PIVOTS), mass_above)
        if BY_MASS:
            stops = count - count_above <= 1
        else:
            stops = (count - count_above <= 1) | is_short
        high = tl.where(is_inner, next_low - 1, high)
        low = low + step * pivot.to(tl.int64)
        continues = ((low < high) & (stops == 0)).to(tl.int32)
    return low, high, count, count_above, mass_above


@triton.jit
def _find_equal(at, vocab_size, key, number, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the token of the `number`-th logit with this key."""
    before, found = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        logit = tl.load(at + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        is_equal = (inside & (key_of(logit, SHIFT) == key)).to(tl.int32)
        running = before + tl.cumsum(is_equal, axis=0)
        found += tl.sum(tl.where((is_equal > 0) & (running == number), tokens, 0))
        before += tl.sum(is_equal)
    return found


@triton.jit
def _search_thresholds(
    logits,
    slots,
    weights,
    temperature,
    min_p,
    top_k,
    top_p,
    thresholds,
    last_ids,
    vocab_size,
    stride,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    found = tl.load(thresholds + row)
    if found == found:
        return
    slot = tl.load(slots + row).to(tl.int64)
    temp = tl.load(temperature + slot).to(tl.float32)
    min_share, top_share = tl.load(min_p + slot).to(tl.float32), tl.load(top_p + slot).to(tl.float32)
    max_count = tl.minimum(tl.load(top_k + slot), vocab_size).to(tl.int32)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at_chunks = weights + (row * num_chunks + chunks) * 2
    tops = tl.load(at_chunks, mask=chunks < num_chunks, other=float("-inf"))
    best = tl.max(tops)
    narrows = (min_share > 0.0) | ((max_count > 0) & (max_count < vocab_size))
    at = logits + row * stride
    scale = 1.4426950408889634 / temp
    totals = tl.load(at_chunks + 1, mask=chunks < num_chunks, other=0.0)
    kept_mass = tl.sum(tl.where(totals > 0.0, totals * tl.exp2((tops - best) * scale), 0.0))
    low = key_of(tl.full([], float("-inf"), tl.float32), SHIFT).to(tl.int64)
    top = key_of(best, SHIFT).to(tl.int64)
    num_equal = tl.full([], 0, tl.int32)  # logits equal to the threshold that are kept
    num_others = tl.full([], 0, tl.int32)  # and that are not kept
    if narrows:
        if min_share > 0.0:
            low = tl.minimum(key_from(best + temp * tl.log(min_share), SHIFT).to(tl.int64), top)
        target = tl.where(max_count > 0, max_count, vocab_size)
        low, high, count, count_above, mass_above = _search(
            at, vocab_size, best, scale, low, top, target, False, SHIFT, PIVOTS, BLOCK
        )
        num_others = tl.maximum(count - target, 0)  # if there are any, all in the range are equal
        num_equal = count - count_above - num_others
        if top_share < 1.0:
            _, masses = _measure(at, vocab_size, best, scale, low, high + 1 - low, True, SHIFT, PIVOTS, BLOCK)
            weight = tl.exp2((value_of(low.to(tl.int32), SHIFT) - best) * scale)
            without_others = _at(masses, 1, PIVOTS) + num_equal.to(tl.float32) * weight
            kept_mass = tl.where(num_others > 0, without_others, _at(masses, 0, PIVOTS))
    if top_share < 1.0:
        # Lighter tokens together weigh less than 1 - top_p.
        lightest = best + temp * tl.log(0.99 * (1.0 - top_share) * kept_mass / vocab_size)
        floor = tl.minimum(key_from(lightest, SHIFT).to(tl.int64), top)
        was_low = low
        target = top_share * kept_mass
        low, high, count, count_above, mass_above = _search(
            at, vocab_size, best, scale, tl.maximum(low, floor), top, target, True, SHIFT, PIVOTS, BLOCK
        )
        at_hand = count - count_above
        at_hand = tl.where((low == was_low) & (num_others > 0), num_equal, at_hand)
        if (low == high) & (at_hand > 1):
            weight = tl.exp2((value_of(low.to(tl.int32), SHIFT) - best) * scale)
            needed = tl.ceil((target - mass_above) / tl.maximum(weight, 1e-38)).to(tl.int32)
            num_equal = tl.maximum(1, tl.minimum(needed, at_hand))
        else:
            num_equal = at_hand
        num_others = count - count_above - num_equal
    tl.store(thresholds + row, value_of(low.to(tl.int32), SHIFT))
    if num_others > 0:
        last = _find_equal(at, vocab_size, low.to(tl.int32), num_equal, SHIFT, BLOCK)
        tl.store(last_ids + row, last)
    else:
        tl.store(last_ids + row, vocab_size)
