"""The draw: temperature and two uniform numbers a row, in one pass over the logits and one chunk more.

    weigh    each chunk of a row: its largest logit, and the sum of e**(logit / T - that)
    cut      only with filters: `cuts.find_cuts`, and the rows that have any are weighed again
    choose   the chunk by the sums of all, then the token inside the chunk

A row without filters goes through the same sums whether its neighbours have some or not.

The numbers are Philox's for the row's seed and length, so a row draws the same whatever it is batched with. They are
used otherwise than on a CPU, where the same seed gives another answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.filters import Cuts, Filters
from headrace.kernels.gpu.thresholds import CHUNK, find_cuts

WEIGH_WARPS = 4


def draw(
    logits: Tensor,  # [R, V]
    rows: Tensor,  # [R] int32 or int64
    lens: Tensor,  # [num_rows] int64, tokens of each row before this one; [R] if `lens_of_batch`
    temperature: Tensor,  # [num_rows] float64; 0 is greedy
    seed: Tensor,  # [num_rows] int64
    drawn: Tensor,  # [R] int64, out
    flags: Tensor,  # [R] uint8, out: 3 where the logits were not fit to choose from
    filters: Filters | None = None,  # in use by any of the rows
    *,
    lens_of_batch: bool = False,
) -> None:
    num_rows, vocab_size = logits.shape
    weights = weigh(logits, rows, temperature)
    device = logits.device
    cuts = Cuts(
        values=torch.empty(num_rows, dtype=torch.float32, device=device),
        last_ids=torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if filters is not None:
        find_cuts(logits, rows, weights, temperature, filters, cuts)
        _weigh_again(logits, rows, temperature, weights, cuts)
    num_chunks = weights.shape[1]
    _choose[(num_rows,)](
        logits,
        rows,
        lens,
        temperature,
        seed,
        weights,
        cuts.values,
        cuts.last_ids,
        drawn,
        flags,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_CUTS=filters is not None,
        LENS_OF_BATCH=lens_of_batch,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )


def weigh(logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    """Of each chunk: its largest logit (NaN if any is), and the sum of its weights in units of that one's.

    [R, num_chunks, 2]
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    weights = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=logits.device)
    _weigh[(num_rows, num_chunks)](
        logits,
        rows,
        temperature,
        weights,
        weights,
        weights,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_CUTS=False,
        num_warps=WEIGH_WARPS,
    )
    return weights


def _weigh_again(logits: Tensor, rows: Tensor, temperature: Tensor, weights: Tensor, cuts: Cuts) -> None:
    """The rows of which something was cut off."""
    num_rows, num_chunks, _ = weights.shape
    _weigh[(num_rows, num_chunks)](
        logits,
        rows,
        temperature,
        weights,
        cuts.values,
        cuts.last_ids,
        logits.shape[1],
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_CUTS=True,
        num_warps=WEIGH_WARPS,
    )


@triton.jit
def _inverse(temperature):
    return tl.where(temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)


@triton.jit
def _kept(logit, tokens, cut, last_id):
    """The logits that a row keeps, -inf for the others. A cut of -inf keeps all."""
    is_kept = (logit > cut) | ((logit == cut) & (tokens <= last_id)) | (logit != logit)
    return tl.where(is_kept, logit, float("-inf"))


@triton.jit
def _weigh(
    logits,
    rows,
    temperature,
    weights,
    cuts,
    last_ids,
    vocab_size,
    stride,
    num_chunks,
    CHUNK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if HAS_CUTS:
        cut = tl.load(cuts + place)
        last_id = tl.load(last_ids + place)
        if cut == float("-inf"):
            return  # weighed already
        if tl.load(weights + (place * num_chunks + chunk) * 2) < cut:
            tl.store(weights + (place * num_chunks + chunk) * 2, float("-inf"))
            tl.store(weights + (place * num_chunks + chunk) * 2 + 1, 0.0)
            return
    row = tl.load(rows + place).to(tl.int64)
    scale = _inverse(tl.load(temperature + row).to(tl.float32)) * 1.4426950408889634
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    logit = tl.load(logits + place * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_CUTS:
        logit = _kept(logit, tokens, cut, last_id)
    top = tl.max(logit)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((logit - floor) * scale))
    at = weights + (place * num_chunks + chunk) * 2
    tl.store(at, tl.where(total != total, float("nan"), top))
    tl.store(at + 1, total)


@triton.jit
def _uniforms(seed, position):
    """Two numbers in [0, 1) from Philox-4x32-10 with the seed as key and the position as counter."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    first, _, third, _ = tl.philox(seed, low, high, zero, zero)
    one = (first >> 8).to(tl.float32) * 5.9604644775390625e-08
    two = (third >> 8).to(tl.float32) * 5.9604644775390625e-08
    return one, two


@triton.jit
def _choose(
    logits,
    rows,
    lens,
    temperature,
    seed,
    weights,
    cuts,
    last_ids,
    drawn,
    flags,
    vocab_size,
    stride,
    num_chunks,
    CHUNK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    LENS_OF_BATCH: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    scale = _inverse(heat) * 1.4426950408889634
    chunks = tl.arange(0, CHUNKS_BLOCK)
    inside = chunks < num_chunks
    at = weights + (place * num_chunks + chunks) * 2
    tops = tl.load(at, mask=inside, other=float("-inf"))
    totals = tl.load(at + 1, mask=inside, other=0.0)
    broken = tl.sum((tops != tops).to(tl.int32))
    best, best_chunk = tl.max(tops, axis=0, return_indices=True)
    broken += (tl.abs(best) == float("inf")).to(tl.int32)
    tl.store(flags + place, tl.where(broken > 0, 3, 0).to(tl.uint8))
    if broken > 0:
        tl.store(drawn + place, tl.full([], 0, tl.int64))
        return
    length = tl.load(lens + place) if LENS_OF_BATCH else tl.load(lens + row)
    one, two = _uniforms(tl.load(seed + row), length)
    masses = tl.where(inside, totals * tl.exp2((tops - best) * scale), 0.0)
    running = tl.cumsum(masses, axis=0)
    goal = one * tl.sum(masses)
    chunk = tl.sum(((running <= goal) & inside).to(tl.int32))
    last = tl.max(tl.where(masses > 0.0, chunks, 0))
    chunk = tl.where(heat == 0.0, best_chunk, tl.minimum(chunk, last))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    known = tokens < vocab_size
    logit = tl.load(logits + place * stride + tokens, mask=known, other=float("-inf")).to(tl.float32)
    if HAS_CUTS:
        logit = _kept(logit, tokens, tl.load(cuts + place), tl.load(last_ids + place))
    top, token = tl.max(logit, axis=0, return_indices=True)
    if heat > 0.0:
        weight = tl.exp2((logit - top) * scale)
        inner = tl.cumsum(weight, axis=0)
        goal = two * tl.sum(weight)
        last = tl.max(tl.where(weight > 0.0, tl.arange(0, CHUNK), 0))
        token = tl.minimum(tl.sum((inner <= goal).to(tl.int32)), last)
    tl.store(drawn + place, (chunk * CHUNK + token).to(tl.int64))
