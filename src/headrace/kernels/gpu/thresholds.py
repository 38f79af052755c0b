"""Finds the logit thresholds of min_p, top_k and top_p for each row of logits, without a sort.

    plan        what each row searches for, from the sums of its chunks; min_p alone gives its threshold directly
    histogram   a quarter of a row's logits, counted in BINS bins from the row's best logit downwards
    bound       two logits between which the threshold should lie, with a margin for the error of the histogram
    gather      all logits between the two, and exactly how many, or with what weight, lie above
    settle      the threshold among them, by bisection
    search      for rows with too many equal logits, or whose threshold was outside the bounds (`threshold_search`)

A row keeps the logits above its threshold, and of those equal to it the ones up to one token id. An unlucky histogram
only costs time: `settle` checks that the gathered logits contain the threshold. Every sum is over one row and in a
fixed order, so the result does not depend on the batch.

For top_p the histogram is summed from below. The weight below the threshold comes from many light tokens, which a
quarter of them estimates well. The weight above can be that of a single token, which the quarter may miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.sort_keys import SHIFTS, key_from, key_of, value_of
from headrace.kernels.gpu.threshold_search import search_thresholds
from headrace.kernels.gpu.threshold_types import Filters, Thresholds

CHUNK = 4096  # logits per program
BINS = 256
CANDIDATES = 8192  # room for the gathered logits of a row; bounds aim at half of it
LANES = 32  # groups of 16 bytes that `gather` reads together; a program's groups are spread over the vocabulary
HISTOGRAM_WARPS, GATHER_WARPS, SETTLE_WARPS = 4, 1, 16

_FOUND, _BY_COUNT, _BY_MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a row searches for
_ONE_OF = tl.constexpr(4)  # the histogram counts one of this many logits
_STRIPE = tl.constexpr(64)  # consecutive logits that are counted together


@dataclass(frozen=True, slots=True)
class Scratch:
    """Buffers between the kernels."""

    kinds: Tensor  # [R] int32
    measures: Tensor  # [R, 5] float32, see _plan
    counts: Tensor  # [R, num_histograms, BINS] int16
    tails: Tensor  # [R, num_histograms] float32, the weight of what lies below all bins
    bounds: Tensor  # [R, 2] float32, the lowest and the highest logit that is gathered; NaN if none is
    numbers: Tensor  # [R, num_chunks] int32, how many logits each program of `gather` found between the bounds
    masses: Tensor  # [R, num_chunks, 2] float32, weight above the bounds, and of all that min_p keeps; see _gather
    candidates: Tensor  # [R, CHUNKS_BLOCK, room] int64: a logit's bits, and the token id

    @classmethod
    def allocate(cls, num_rows: int, num_histograms: int, num_chunks: int, room: int, device: torch.device) -> Scratch:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            kinds=empty(dtype=torch.int32),
            measures=empty(5),
            counts=empty(num_histograms, BINS, dtype=torch.int16),
            tails=empty(num_histograms),
            bounds=empty(2),
            numbers=empty(num_chunks, dtype=torch.int32),
            masses=empty(num_chunks, 2),
            candidates=empty(num_chunks, room, dtype=torch.int64),
        )


def find_thresholds(
    logits: Tensor,  # [R, V]
    slots: Tensor,  # [R] int32 or int64, the slot of each row
    weights: Tensor,  # [R, num_chunks, 2] float32, see sample.weigh
    temperature: Tensor,  # [num_slots] float64; 0 is greedy
    filters: Filters,
    thresholds: Thresholds,  # out
) -> None:
    """Writes the thresholds of all rows."""
    num_rows, vocab_size = logits.shape
    num_chunks, stride, shift = weights.shape[1], logits.stride(0), SHIFTS[logits.dtype]
    num_histograms = triton.cdiv(vocab_size, CHUNK * _ONE_OF.value)
    chunks_block = triton.next_power_of_2(num_chunks)
    room = min(CHUNK, max(16, CANDIDATES // chunks_block))
    scratch = Scratch.allocate(num_rows, num_histograms, num_chunks, room, logits.device)
    _plan[(num_rows,)](
        slots, weights, temperature, filters.min_p, filters.top_k, filters.top_p, thresholds.values,
        thresholds.last_ids, scratch.kinds, scratch.measures, vocab_size, num_chunks,
        CHUNKS_BLOCK=chunks_block, BINS=BINS, SHIFT=shift, num_warps=1,
    )  # fmt: skip
    _histogram[(num_rows, num_histograms)](
        logits, scratch.kinds, scratch.measures, scratch.counts, scratch.tails, vocab_size, stride, num_histograms,
        CHUNK=CHUNK, BINS=BINS, num_warps=HISTOGRAM_WARPS,
    )  # fmt: skip
    _bound[(num_rows,)](
        slots, filters.min_p, filters.top_k, filters.top_p, scratch.kinds, scratch.measures, scratch.counts,
        scratch.tails, scratch.bounds, num_histograms,
        HISTOGRAMS_BLOCK=triton.next_power_of_2(num_histograms), BINS=BINS, CANDIDATES=CANDIDATES, num_warps=4,
    )  # fmt: skip
    _gather[(num_rows, num_chunks)](
        logits, slots, filters.min_p, scratch.kinds, scratch.measures, scratch.bounds, scratch.numbers,
        scratch.masses, scratch.candidates, vocab_size, stride, num_chunks,
        CHUNK=CHUNK, GROUP=16 // logits.element_size(), LANES=LANES, ROOM=room, num_warps=GATHER_WARPS,
    )  # fmt: skip
    _settle[(num_rows,)](
        slots, filters.min_p, filters.top_k, filters.top_p, scratch.kinds, scratch.measures, scratch.bounds,
        scratch.numbers, scratch.masses, scratch.candidates, thresholds.values, thresholds.last_ids, vocab_size,
        num_chunks, CHUNKS_BLOCK=chunks_block, ROOM=room, SHIFT=shift, num_warps=SETTLE_WARPS,
    )  # fmt: skip
    search_thresholds(logits, slots, weights, temperature, filters, thresholds)


@triton.jit
def _plan(
    slots,
    weights,
    temperature,
    min_p,
    top_k,
    top_p,
    thresholds,
    last_ids,
    kinds,
    measures,
    vocab_size,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Stores what a row searches for, and five measures: its best logit, the scale of a weight's exponent, bins per
    unit of logit, the lowest logit that can be kept, and the weight of all logits relative to the best."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temp = tl.load(temperature + slot).to(tl.float32)
    min_share, top_share = tl.load(min_p + slot).to(tl.float32), tl.load(top_p + slot).to(tl.float32)
    max_count = tl.load(top_k + slot)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at_chunks = weights + (row * num_chunks + chunks) * 2
    tops = tl.load(at_chunks, mask=chunks < num_chunks, other=float("-inf"))
    best = tl.max(tops)
    is_fit = (tl.sum((tops != tops).to(tl.int32)) == 0) & (tl.abs(best) < float("inf"))
    by_count = (max_count > 0) & (max_count < vocab_size)
    kind, threshold = tl.full([], _FOUND, tl.int32), tl.full([], float("-inf"), tl.float32)
    if (temp > 0.0) & is_fit & (by_count | (top_share < 1.0) | (min_share > 0.0)):
        scale = 1.4426950408889634 / temp
        totals = tl.load(at_chunks + 1, mask=chunks < num_chunks, other=0.0)
        mass = tl.sum(tl.where(totals > 0.0, totals * tl.exp2((tops - best) * scale), 0.0))
        lowest = tl.full([], -3.4028234663852886e38, tl.float32)  # everything finite
        if min_share > 0.0:
            top = key_of(best, SHIFT)
            lowest = value_of(tl.minimum(key_from(best + temp * tl.log(min_share), SHIFT), top), SHIFT)
            threshold = lowest
        elif by_count == 0:  # lighter tokens together weigh less than 1 - top_p
            lowest = best + temp * tl.log(0.99 * (1.0 - top_share) * mass / vocab_size)
        kind = tl.where(by_count, _BY_COUNT, tl.where(top_share < 1.0, _BY_MASS, _FOUND))
        at = measures + row * 5
        tl.store(at, best)
        tl.store(at + 1, scale)
        tl.store(at + 2, BINS / tl.minimum(tl.maximum(best - lowest, 1e-6), 1e30))
        tl.store(at + 3, lowest)
        tl.store(at + 4, mass)
    tl.store(kinds + row, kind)
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, vocab_size)


@triton.jit
def _bin(distance, kind, per_unit, BINS: tl.constexpr):
    """Returns the bin of a distance from the best logit. By mass, all bins have the same width; by count, the width
    grows with the distance: 32 units in eight octaves."""
    if kind == _BY_MASS:
        bin = tl.minimum(distance * per_unit, BINS - 1.0).to(tl.int32)
    else:
        octaves = tl.fma(distance, 8.0, 1.0).to(tl.uint32, bitcast=True) - 0x3F800000
        bin = tl.minimum(octaves // ((8 << 23) // BINS), BINS - 1).to(tl.int32)
    return bin


@triton.jit
def _distance(bin, kind, per_unit, BINS: tl.constexpr):
    """Returns the distance from the best logit at which a bin starts."""
    octaves = (bin * ((8 << 23) // BINS) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(kind == _BY_MASS, bin / per_unit, (octaves - 1.0) / 8.0)


@triton.jit
def _histogram(
    logits,
    kinds,
    measures,
    counts,
    tails,
    vocab_size,
    stride,
    num_histograms,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kinds + row)
    if kind == _FOUND:
        return
    at = measures + row * 5
    best, scale, per_unit, lowest = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    nth = chunk * CHUNK + tl.arange(0, CHUNK)
    tokens = (nth // _STRIPE) * (_STRIPE * _ONE_OF) + nth % _STRIPE
    logit = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    is_counted = logit >= lowest
    found = tl.histogram(_bin(best - logit, kind, per_unit, BINS), BINS, mask=is_counted)
    at_chunk = row * num_histograms + chunk
    tl.store(counts + at_chunk * BINS + tl.arange(0, BINS), found.to(tl.int16))
    if kind == _BY_MASS:
        tl.store(tails + at_chunk, tl.sum(tl.where(is_counted, 0.0, tl.exp2((logit - best) * scale))))


@triton.jit
def _around(running, rank, half, BINS: tl.constexpr):
    """Returns the first and last bin of the logits up to `half` ranks before or after a rank."""
    first = tl.sum((running < rank - half).to(tl.int32))
    return first, tl.minimum(tl.sum((running < rank + half).to(tl.int32)), BINS - 1)


@triton.jit
def _between(by_bin, first, last, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    return tl.sum(tl.where((bins >= first) & (bins <= last), by_bin, 0))


@triton.jit
def _bound(
    slots,
    min_p,
    top_k,
    top_p,
    kinds,
    measures,
    counts,
    tails,
    bounds,
    num_histograms,
    HISTOGRAMS_BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind == _FOUND:
        return
    slot = tl.load(slots + row).to(tl.int64)
    at = measures + row * 5
    best, scale, per_unit = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    lowest, mass = tl.load(at + 3), tl.load(at + 4)
    top_share = tl.load(top_p + slot).to(tl.float32)
    chunks, bins = tl.arange(0, HISTOGRAMS_BLOCK), tl.arange(0, BINS)
    is_chunk = chunks < num_histograms
    at_counts = counts + (row * num_histograms + chunks[:, None]) * BINS + bins[None, :]
    by_bin = tl.sum(tl.load(at_counts, mask=is_chunk[:, None], other=0).to(tl.int32), axis=0)
    running = tl.cumsum(by_bin, axis=0)
    if kind == _BY_COUNT:
        expected = tl.load(top_k + slot).to(tl.float32) / _ONE_OF
        room = 6.0 * tl.sqrt(expected) + 4.0
        first = tl.sum((running < expected - room).to(tl.int32))
        last = tl.sum((running < expected + room).to(tl.int32))
        first = tl.where(top_share < 1.0, 0, first)  # top_p needs all that top_k keeps
    else:
        tail = _ONE_OF * tl.sum(tl.load(tails + row * num_histograms + chunks, mask=is_chunk, other=0.0))
        masses = _ONE_OF * by_bin * tl.exp2((bins + 0.5) * (-scale / per_unit))
        if tl.load(min_p + slot).to(tl.float32) > 0.0:  # min_p has removed the tail
            goal = (1.0 - top_share) * (mass - tail)
        else:
            goal = (1.0 - top_share) * mass - tail
        below = tl.sum(masses) - tl.cumsum(masses, axis=0)
        middle = tl.minimum(tl.sum((below > goal).to(tl.int32)), BINS - 1)
        is_middle = bins == middle
        fraction = (goal - tl.sum(tl.where(is_middle, below, 0.0))) / tl.maximum(
            tl.sum(tl.where(is_middle, masses, 0.0)), 1e-30
        )
        fraction = tl.minimum(tl.maximum(fraction, 0.0), 1.0)  # of the bin, below the threshold
        rank = tl.sum(tl.where(is_middle, running - fraction * by_bin, 0.0))
        half = 3 * CANDIDATES // 16 // _ONE_OF
        first, last = _around(running, rank, half, BINS)
        if _between(by_bin, first, last, BINS) * _ONE_OF > 3 * CANDIDATES // 4:
            first, last = _around(running, rank, half // 3, BINS)
    number = _between(by_bin, first, last, BINS) * _ONE_OF
    low = tl.maximum(best - _distance(last + 1, kind, per_unit, BINS), lowest)
    low = tl.where(last >= BINS - 1, lowest, low)
    high = tl.where(first <= 0, best, best - _distance(first, kind, per_unit, BINS))
    is_room = number <= 3 * CANDIDATES // 4
    tl.store(bounds + row * 2, tl.where(is_room, low, float("nan")))
    tl.store(bounds + row * 2 + 1, high)


@triton.jit
def _gather(
    logits,
    slots,
    min_p,
    kinds,
    measures,
    bounds,
    numbers,
    masses,
    candidates,
    vocab_size,
    stride,
    num_chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Gathers the logits between the bounds. By count, each logit weighs 1. A program is one warp, which needs no
    barriers, and a thread stores the logits that it loaded, in the order of lanes; threads exchange only counts."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kinds + row)
    if kind == _FOUND:
        return
    low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    if low != low:
        return
    at = measures + row * 5
    best, scale, lowest = tl.load(at), tl.load(at + 1), tl.load(at + 3)
    scale = tl.where(kind == _BY_MASS, scale, 0.0)
    has_floor = (kind == _BY_MASS) & (tl.load(min_p + tl.load(slots + row)) > 0.0)
    at_chunk = row * num_chunks + chunk
    places = candidates + at_chunk * ROOM
    number = tl.full([], 0, tl.int32)
    above, whole = tl.zeros([GROUP, LANES], tl.float32), tl.zeros([GROUP, LANES], tl.float32)
    inside, lanes = tl.arange(0, GROUP), tl.arange(0, LANES)
    for nth in range(CHUNK // (GROUP * LANES)):
        tokens = ((nth * num_chunks + chunk) * LANES + lanes[None, :]) * GROUP + inside[:, None]
        logit = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        weight = tl.exp2(tl.maximum(logit - best, -1e30) * scale)
        above += tl.where(logit > high, weight, 0.0)
        if has_floor:
            whole += tl.where(logit >= lowest, weight, 0.0)
        is_candidate = (logit >= low) & (logit <= high)
        by_lane = tl.sum(is_candidate.to(tl.int32), axis=0)
        found = tl.sum(by_lane)
        if found > 0:
            before = number + tl.cumsum(by_lane, axis=0) - by_lane
            order = before[None, :] + tl.cumsum(is_candidate.to(tl.int32), axis=0)
            packed = (logit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tokens
            tl.store(places + order - 1, packed, mask=is_candidate & (order <= ROOM))
        number += found
    tl.store(numbers + at_chunk, number)
    tl.store(masses + at_chunk * 2, tl.sum(above))
    tl.store(masses + at_chunk * 2 + 1, tl.sum(whole))


@triton.jit
def _highest(keys, weight, target):
    """Returns the highest key such that the candidates from it upwards weigh at least the target. All candidates
    together do; those that are out weigh 0."""
    low = tl.min(tl.where(weight > 0.0, keys, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(weight > 0.0, keys, -0x80000000)).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum(tl.where(keys >= middle.to(tl.int32), weight, 0.0)) >= target:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _last_id(tokens, is_equal, number, vocab_size):
    """Returns the id of the `number`-th of these tokens, or the vocabulary size if there are not more than that."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab_size
    if tl.sum(is_equal.to(tl.int32)) <= number:
        low = high
    while low < high:
        middle = (low + high) // 2
        if tl.sum((is_equal & (tokens <= middle)).to(tl.int32)) >= number:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _settle(
    slots,
    min_p,
    top_k,
    top_p,
    kinds,
    measures,
    bounds,
    numbers,
    masses,
    candidates,
    thresholds,
    last_ids,
    vocab_size,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + row)
    if kind == _FOUND:
        return
    low = tl.load(bounds + row * 2)
    if low != low:
        tl.store(thresholds + row, float("nan"))  # left to the search
        return
    slot = tl.load(slots + row).to(tl.int64)
    top_share = tl.load(top_p + slot).to(tl.float32)
    at = measures + row * 5
    best, scale, lowest, mass = tl.load(at), tl.load(at + 1), tl.load(at + 3), tl.load(at + 4)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at_chunks = row * num_chunks + chunks
    found = tl.load(numbers + at_chunks, mask=chunks < num_chunks, other=0)
    above = tl.sum(tl.load(masses + at_chunks * 2, mask=chunks < num_chunks, other=0.0))
    number = tl.sum(found)
    nth = tl.arange(0, ROOM)
    is_kept = nth[None, :] < found[:, None]
    packed = tl.load(candidates + at_chunks[:, None] * ROOM + nth[None, :], mask=is_kept, other=0)
    value = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    token = packed.to(tl.int32)
    keys = tl.where(is_kept, key_of(value, SHIFT), -0x80000000)
    is_found = tl.max(found) <= ROOM
    threshold, last_id = tl.load(thresholds + row), vocab_size + tl.full([], 0, tl.int32)
    if is_found & (kind == _BY_COUNT):
        needed = tl.load(top_k + slot).to(tl.int32) - above.to(tl.int32)
        is_found = (needed > 0) & ((needed <= number) | (low == lowest))
        if is_found & (needed < number):
            key = _highest(keys, is_kept.to(tl.float32), needed.to(tl.float32))
            last_id = _last_id(token, keys == key, needed - tl.sum((keys > key).to(tl.int32)), vocab_size)
            is_kept = (keys > key) | ((keys == key) & (token <= last_id))
            threshold = value_of(key, SHIFT)
    if is_found & (top_share < 1.0):
        weight = tl.where(is_kept, tl.exp2((value - best) * scale), 0.0)
        at_hand = tl.sum(weight)
        needed = top_share * at_hand
        if kind == _BY_MASS:
            if tl.load(min_p + slot).to(tl.float32) > 0.0:
                mass = tl.sum(tl.load(masses + at_chunks * 2 + 1, mask=chunks < num_chunks, other=0.0))
            needed = top_share * mass - above
        is_found = (needed > 0.0) & (needed <= at_hand)
        if is_found:
            key = _highest(keys, weight, needed)
            missing = needed - tl.sum(tl.where(keys > key, weight, 0.0))
            each = tl.exp2((value_of(key, SHIFT) - best) * scale)
            number = tl.minimum(tl.ceil(missing / tl.maximum(each, 1e-30)), vocab_size).to(tl.int32)
            within = tl.where(threshold == value_of(key, SHIFT), last_id, vocab_size)
            last_id = tl.minimum(_last_id(token, is_kept & (keys == key), number, vocab_size), within)
            threshold = value_of(key, SHIFT)
    tl.store(thresholds + row, tl.where(is_found, threshold, float("nan")))
    tl.store(last_ids + row, last_id)
