"""Where min_p, top_k and top_p cut a row of logits off. Nothing is sorted.

    plan     what each row is to look for, from the sums of its chunks; min_p alone is a threshold, and found
    sample   of a quarter of a row's logits: how many lie in each of BINS bins, from the row's best downwards
    bound    between which two logits the cut should lie, with room for what a sample may be off by
    gather   all logits between the two, and exactly how many, or with what weight, lie above
    settle   the cut among them, by halving
    search   for rows with too many logits alike, or whose cut was not where it should be (`cut_search`)

A row keeps what lies above its cut, and of the logits equal to the cut those up to one token id. The sample can only
cost time: what was gathered is checked to hold the cut. Every sum is over one row and in a fixed order.

top_p looks at the sample from below: the weight under the cut is that of many light tokens, which a quarter of them
tells well. That above can be one token's, which the sample may lack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.filters import Cuts, Filters
from headrace.kernels.gpu.keys import SHIFTS, key_from, key_of, value_of
from headrace.kernels.gpu.threshold_search import search_cuts

CHUNK = 4096  # logits of a program
BINS = 256
CANDIDATES = 8192  # places for what is gathered of a row; half of them are meant to be used
LANES = 32  # groups of 16 bytes that `gather` looks at together; a program's lie all over the vocabulary
SAMPLE_WARPS, GATHER_WARPS, SETTLE_WARPS = 4, 1, 16

_FOUND, _BY_COUNT, _BY_MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a row looks for
_ONE_OF = tl.constexpr(4)  # logits is in the sample
_STRIPE = tl.constexpr(64)  # that lie together in the sample


@dataclass(frozen=True, slots=True)
class Scratch:
    """What the kernels hand on."""

    kinds: Tensor  # [R] int32
    measures: Tensor  # [R, 5] float32, see _plan
    counts: Tensor  # [R, num_samples, BINS] int16
    tails: Tensor  # [R, num_samples] float32, the weight of what lies below all bins
    bounds: Tensor  # [R, 2] float32, the lowest and the highest logit that is gathered; NaN if none is
    numbers: Tensor  # [R, num_chunks] int32, how many logits a program of `gather` has found between the bounds
    masses: Tensor  # [R, num_chunks, 2] float32, what lies above the bounds, and all that min_p leaves; see _gather
    candidates: Tensor  # [R, CHUNKS_BLOCK, room] int64: a logit's bits, and its token id

    @classmethod
    def allocate(cls, num_rows: int, num_samples: int, num_chunks: int, room: int, device: torch.device) -> Scratch:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            kinds=empty(dtype=torch.int32),
            measures=empty(5),
            counts=empty(num_samples, BINS, dtype=torch.int16),
            tails=empty(num_samples),
            bounds=empty(2),
            numbers=empty(num_chunks, dtype=torch.int32),
            masses=empty(num_chunks, 2),
            candidates=empty(num_chunks, room, dtype=torch.int64),
        )


def find_cuts(
    logits: Tensor,  # [R, V]
    rows: Tensor,  # [R] int32 or int64
    weights: Tensor,  # [R, num_chunks, 2] float32, see draw.weigh
    temperature: Tensor,  # [num_rows] float64; 0 is greedy
    filters: Filters,
    cuts: Cuts,  # out
) -> None:
    num_rows, vocab_size = logits.shape
    num_chunks, stride, shift = weights.shape[1], logits.stride(0), SHIFTS[logits.dtype]
    num_samples = triton.cdiv(vocab_size, CHUNK * _ONE_OF.value)
    chunks_block = triton.next_power_of_2(num_chunks)
    room = min(CHUNK, max(16, CANDIDATES // chunks_block))
    scratch = Scratch.allocate(num_rows, num_samples, num_chunks, room, logits.device)
    _plan[(num_rows,)](
        rows, weights, temperature, filters.min_p, filters.top_k, filters.top_p, cuts.values, cuts.last_ids,
        scratch.kinds, scratch.measures, vocab_size, num_chunks,
        CHUNKS_BLOCK=chunks_block, BINS=BINS, SHIFT=shift, num_warps=1,
    )  # fmt: skip
    _sample[(num_rows, num_samples)](
        logits, scratch.kinds, scratch.measures, scratch.counts, scratch.tails, vocab_size, stride, num_samples,
        CHUNK=CHUNK, BINS=BINS, num_warps=SAMPLE_WARPS,
    )  # fmt: skip
    _bound[(num_rows,)](
        rows, filters.min_p, filters.top_k, filters.top_p, scratch.kinds, scratch.measures, scratch.counts,
        scratch.tails, scratch.bounds, num_samples,
        SAMPLES_BLOCK=triton.next_power_of_2(num_samples), BINS=BINS, CANDIDATES=CANDIDATES, num_warps=4,
    )  # fmt: skip
    _gather[(num_rows, num_chunks)](
        logits, rows, filters.min_p, scratch.kinds, scratch.measures, scratch.bounds, scratch.numbers,
        scratch.masses, scratch.candidates, vocab_size, stride, num_chunks,
        CHUNK=CHUNK, GROUP=16 // logits.element_size(), LANES=LANES, ROOM=room, num_warps=GATHER_WARPS,
    )  # fmt: skip
    _settle[(num_rows,)](
        rows, filters.min_p, filters.top_k, filters.top_p, scratch.kinds, scratch.measures, scratch.bounds,
        scratch.numbers, scratch.masses, scratch.candidates, cuts.values, cuts.last_ids, vocab_size, num_chunks,
        CHUNKS_BLOCK=chunks_block, ROOM=room, SHIFT=shift, num_warps=SETTLE_WARPS,
    )  # fmt: skip
    search_cuts(logits, rows, weights, temperature, filters, cuts)


@triton.jit
def _plan(
    rows,
    weights,
    temperature,
    min_p,
    top_k,
    top_p,
    cuts,
    last_ids,
    kinds,
    measures,
    vocab_size,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """What a row looks for, and its best logit, its scale (of a weight's exponent), how many bins there are to a unit,
    the lowest logit that can be kept or be the cut, and the weight of all logits in units of the best's."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    least, share = tl.load(min_p + row).to(tl.float32), tl.load(top_p + row).to(tl.float32)
    most = tl.load(top_k + row)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at_chunks = weights + (place * num_chunks + chunks) * 2
    tops = tl.load(at_chunks, mask=chunks < num_chunks, other=float("-inf"))
    best = tl.max(tops)
    is_fit = (tl.sum((tops != tops).to(tl.int32)) == 0) & (tl.abs(best) < float("inf"))
    by_count = (most > 0) & (most < vocab_size)
    kind, cut = tl.full([], _FOUND, tl.int32), tl.full([], float("-inf"), tl.float32)
    if (heat > 0.0) & is_fit & (by_count | (share < 1.0) | (least > 0.0)):
        scale = 1.4426950408889634 / heat
        totals = tl.load(at_chunks + 1, mask=chunks < num_chunks, other=0.0)
        mass = tl.sum(tl.where(totals > 0.0, totals * tl.exp2((tops - best) * scale), 0.0))
        lowest = tl.full([], -3.4028234663852886e38, tl.float32)  # all that is finite
        if least > 0.0:
            top = key_of(best, SHIFT)
            lowest = value_of(tl.minimum(key_from(best + heat * tl.log(least), SHIFT), top), SHIFT)
            cut = lowest
        elif by_count == 0:  # what is lighter weighs less than 1 - top_p together
            lowest = best + heat * tl.log(0.99 * (1.0 - share) * mass / vocab_size)
        kind = tl.where(by_count, _BY_COUNT, tl.where(share < 1.0, _BY_MASS, _FOUND))
        at = measures + place * 5
        tl.store(at, best)
        tl.store(at + 1, scale)
        tl.store(at + 2, BINS / tl.minimum(tl.maximum(best - lowest, 1e-6), 1e30))
        tl.store(at + 3, lowest)
        tl.store(at + 4, mass)
    tl.store(kinds + place, kind)
    tl.store(cuts + place, cut)
    tl.store(last_ids + place, vocab_size)


@triton.jit
def _bin(distance, kind, per_unit, BINS: tl.constexpr):
    """By mass, bins of one width; by count, of a width that grows with the distance: 32 units in eight octaves."""
    if kind == _BY_MASS:
        place = tl.minimum(distance * per_unit, BINS - 1.0).to(tl.int32)
    else:
        octaves = tl.fma(distance, 8.0, 1.0).to(tl.uint32, bitcast=True) - 0x3F800000
        place = tl.minimum(octaves // ((8 << 23) // BINS), BINS - 1).to(tl.int32)
    return place


@triton.jit
def _distance(place, kind, per_unit, BINS: tl.constexpr):
    """From the best logit to where a bin begins."""
    octaves = (place * ((8 << 23) // BINS) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(kind == _BY_MASS, place / per_unit, (octaves - 1.0) / 8.0)


@triton.jit
def _sample(
    logits,
    kinds,
    measures,
    counts,
    tails,
    vocab_size,
    stride,
    num_samples,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kinds + place)
    if kind == _FOUND:
        return
    at = measures + place * 5
    best, scale, per_unit, lowest = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    nth = part * CHUNK + tl.arange(0, CHUNK)
    tokens = (nth // _STRIPE) * (_STRIPE * _ONE_OF) + nth % _STRIPE
    logit = tl.load(logits + place * stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    is_counted = logit >= lowest
    found = tl.histogram(_bin(best - logit, kind, per_unit, BINS), BINS, mask=is_counted)
    at_part = place * num_samples + part
    tl.store(counts + at_part * BINS + tl.arange(0, BINS), found.to(tl.int16))
    if kind == _BY_MASS:
        tl.store(tails + at_part, tl.sum(tl.where(is_counted, 0.0, tl.exp2((logit - best) * scale))))


@triton.jit
def _around(running, rank, half, BINS: tl.constexpr):
    """The bins of the logits that come up to `half` places before or after a rank."""
    first = tl.sum((running < rank - half).to(tl.int32))
    return first, tl.minimum(tl.sum((running < rank + half).to(tl.int32)), BINS - 1)


@triton.jit
def _between(by_bin, first, last, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    return tl.sum(tl.where((bins >= first) & (bins <= last), by_bin, 0))


@triton.jit
def _bound(
    rows,
    min_p,
    top_k,
    top_p,
    kinds,
    measures,
    counts,
    tails,
    bounds,
    num_samples,
    SAMPLES_BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + place)
    if kind == _FOUND:
        return
    row = tl.load(rows + place).to(tl.int64)
    at = measures + place * 5
    best, scale, per_unit = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    lowest, mass = tl.load(at + 3), tl.load(at + 4)
    share = tl.load(top_p + row).to(tl.float32)
    parts, bins = tl.arange(0, SAMPLES_BLOCK), tl.arange(0, BINS)
    is_part = parts < num_samples
    at_counts = counts + (place * num_samples + parts[:, None]) * BINS + bins[None, :]
    by_bin = tl.sum(tl.load(at_counts, mask=is_part[:, None], other=0).to(tl.int32), axis=0)
    running = tl.cumsum(by_bin, axis=0)
    if kind == _BY_COUNT:
        expected = tl.load(top_k + row).to(tl.float32) / _ONE_OF
        room = 6.0 * tl.sqrt(expected) + 4.0
        first = tl.sum((running < expected - room).to(tl.int32))
        last = tl.sum((running < expected + room).to(tl.int32))
        first = tl.where(share < 1.0, 0, first)  # then top_p asks for all that top_k leaves
    else:
        tail = _ONE_OF * tl.sum(tl.load(tails + place * num_samples + parts, mask=is_part, other=0.0))
        masses = _ONE_OF * by_bin * tl.exp2((bins + 0.5) * (-scale / per_unit))
        if tl.load(min_p + row).to(tl.float32) > 0.0:  # it has taken the tail off
            goal = (1.0 - share) * (mass - tail)
        else:
            goal = (1.0 - share) * mass - tail
        below = tl.sum(masses) - tl.cumsum(masses, axis=0)
        middle = tl.minimum(tl.sum((below > goal).to(tl.int32)), BINS - 1)
        is_middle = bins == middle
        part = (goal - tl.sum(tl.where(is_middle, below, 0.0))) / tl.maximum(
            tl.sum(tl.where(is_middle, masses, 0.0)), 1e-30
        )
        part = tl.minimum(tl.maximum(part, 0.0), 1.0)  # of the bin that lies below the cut
        rank = tl.sum(tl.where(is_middle, running - part * by_bin, 0.0))
        half = 3 * CANDIDATES // 16 // _ONE_OF
        first, last = _around(running, rank, half, BINS)
        if _between(by_bin, first, last, BINS) * _ONE_OF > 3 * CANDIDATES // 4:
            first, last = _around(running, rank, half // 3, BINS)
    number = _between(by_bin, first, last, BINS) * _ONE_OF
    low = tl.maximum(best - _distance(last + 1, kind, per_unit, BINS), lowest)
    low = tl.where(last >= BINS - 1, lowest, low)
    high = tl.where(first <= 0, best, best - _distance(first, kind, per_unit, BINS))
    is_room = number <= 3 * CANDIDATES // 4
    tl.store(bounds + place * 2, tl.where(is_room, low, float("nan")))
    tl.store(bounds + place * 2 + 1, high)


@triton.jit
def _gather(
    logits,
    rows,
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
    """By count, each logit weighs 1. One warp has no barrier to wait at, and a thread keeps the logits that it loads:
    what is stored comes in the order of lanes, and nothing is moved between them but how many there are."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kinds + place)
    if kind == _FOUND:
        return
    low, high = tl.load(bounds + place * 2), tl.load(bounds + place * 2 + 1)
    if low != low:
        return
    at = measures + place * 5
    best, scale, lowest = tl.load(at), tl.load(at + 1), tl.load(at + 3)
    scale = tl.where(kind == _BY_MASS, scale, 0.0)
    has_floor = (kind == _BY_MASS) & (tl.load(min_p + tl.load(rows + place)) > 0.0)
    at_part = place * num_chunks + part
    places = candidates + at_part * ROOM
    number = tl.full([], 0, tl.int32)
    above, whole = tl.zeros([GROUP, LANES], tl.float32), tl.zeros([GROUP, LANES], tl.float32)
    inside, lanes = tl.arange(0, GROUP), tl.arange(0, LANES)
    for nth in range(CHUNK // (GROUP * LANES)):
        tokens = ((nth * num_chunks + part) * LANES + lanes[None, :]) * GROUP + inside[:, None]
        logit = tl.load(logits + place * stride + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
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
    tl.store(numbers + at_part, number)
    tl.store(masses + at_part * 2, tl.sum(above))
    tl.store(masses + at_part * 2 + 1, tl.sum(whole))


@triton.jit
def _highest(keys, weight, target):
    """The highest key from which on up the candidates weigh the target; all of them do. Those that are out weigh 0."""
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
    """The id of the `number`-th of these tokens, or the end of the vocabulary where there are no more than that."""
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
    rows,
    min_p,
    top_k,
    top_p,
    kinds,
    measures,
    bounds,
    numbers,
    masses,
    candidates,
    cuts,
    last_ids,
    vocab_size,
    num_chunks,
    CHUNKS_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    SHIFT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + place)
    if kind == _FOUND:
        return
    low = tl.load(bounds + place * 2)
    if low != low:
        tl.store(cuts + place, float("nan"))  # to be searched for
        return
    row = tl.load(rows + place).to(tl.int64)
    share = tl.load(top_p + row).to(tl.float32)
    at = measures + place * 5
    best, scale, lowest, mass = tl.load(at), tl.load(at + 1), tl.load(at + 3), tl.load(at + 4)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at_chunks = place * num_chunks + chunks
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
    cut, last_id = tl.load(cuts + place), vocab_size + tl.full([], 0, tl.int32)
    if is_found & (kind == _BY_COUNT):
        needed = tl.load(top_k + row).to(tl.int32) - above.to(tl.int32)
        is_found = (needed > 0) & ((needed <= number) | (low == lowest))
        if is_found & (needed < number):
            key = _highest(keys, is_kept.to(tl.float32), needed.to(tl.float32))
            last_id = _last_id(token, keys == key, needed - tl.sum((keys > key).to(tl.int32)), vocab_size)
            is_kept = (keys > key) | ((keys == key) & (token <= last_id))
            cut = value_of(key, SHIFT)
    if is_found & (share < 1.0):
        weight = tl.where(is_kept, tl.exp2((value - best) * scale), 0.0)
        at_hand = tl.sum(weight)
        needed = share * at_hand
        if kind == _BY_MASS:
            if tl.load(min_p + row).to(tl.float32) > 0.0:
                mass = tl.sum(tl.load(masses + at_chunks * 2 + 1, mask=chunks < num_chunks, other=0.0))
            needed = share * mass - above
        is_found = (needed > 0.0) & (needed <= at_hand)
        if is_found:
            key = _highest(keys, weight, needed)
            missing = needed - tl.sum(tl.where(keys > key, weight, 0.0))
            each = tl.exp2((value_of(key, SHIFT) - best) * scale)
            number = tl.minimum(tl.ceil(missing / tl.maximum(each, 1e-30)), vocab_size).to(tl.int32)
            within = tl.where(cut == value_of(key, SHIFT), last_id, vocab_size)
            last_id = tl.minimum(_last_id(token, is_kept & (keys == key), number, vocab_size), within)
            cut = value_of(key, SHIFT)
    tl.store(cuts + place, tl.where(is_found, cut, float("nan")))
    tl.store(last_ids + place, last_id)
