"""Samples tokens: temperature and two uniform numbers per row, in one pass over the logits and one more chunk.

    weigh        each chunk of a row: its largest logit, and the sum of e**((logit - largest) / temperature)
    thresholds   only with filters: `find_thresholds`, after which the rows that have one are weighed again
    choose       a chunk by the sums of all chunks, then a token in it

A row without filters uses the same sums whether other rows have filters or not. The uniform numbers are Philox's for
the slot's seed and the sequence's length, so a sequence samples the same tokens in any batch. The CPU kernel uses the
numbers differently: there the same seed gives other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs
from headrace.kernels.gpu.threshold_types import Filters, Thresholds
from headrace.kernels.gpu.thresholds import CHUNK, find_thresholds

WEIGH_WARPS = 4


def sample(
    logits: Tensor,  # [R, V]
    slots: Tensor,  # [R] int32 or int64, the slot of each row
    lens: Tensor,  # [num_slots] int64, tokens of each sequence before this one; [R] if `lens_of_batch`
    temperature: Tensor,  # [num_slots] float64; 0 is greedy
    seed: Tensor,  # [num_slots] int64
    sampled: Tensor,  # [R] int64, out
    flags: Tensor,  # [R] uint8, out: steps.BROKEN (3) where a logit is NaN or the largest is not finite
    filters: Filters | None = None,  # if any row uses one
    *,
    lens_of_batch: bool = False,
) -> None:
    """Samples one token per row."""
    num_rows, vocab_size = logits.shape
    weights = weigh(logits, slots, temperature)
    device = logits.device
    thresholds = Thresholds(
        values=torch.empty(num_rows, dtype=torch.float32, device=device),
        last_ids=torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if filters is not None:
        find_thresholds(logits, slots, weights, temperature, filters, thresholds)
        _weigh_again(logits, slots, temperature, weights, thresholds)
    num_chunks = weights.shape[1]
    _choose[(num_rows,)](
        logits,
        slots,
        lens,
        temperature,
        seed,
        weights,
        thresholds.values,
        thresholds.last_ids,
        sampled,
        flags,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_THRESHOLDS=filters is not None,
        LENS_OF_BATCH=lens_of_batch,
        CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **dependent_launch(device),
    )


def weigh(logits: Tensor, slots: Tensor, temperature: Tensor) -> Tensor:
    """Returns for each chunk its largest logit (NaN if any is) and the sum of its weights relative to it.

    [R, num_chunks, 2]
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    weights = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=logits.device)
    _weigh[(num_rows, num_chunks)](
        logits,
        slots,
        temperature,
        weights,
        weights,
        weights,
        vocab_size,
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_THRESHOLDS=False,
        num_warps=WEIGH_WARPS,
        **dependent_launch(logits.device),
    )
    return weights


def _weigh_again(logits: Tensor, slots: Tensor, temperature: Tensor, weights: Tensor, thresholds: Thresholds) -> None:
    """Weighs the rows that have a threshold, without what lies below it."""
    num_rows, num_chunks, _ = weights.shape
    _weigh[(num_rows, num_chunks)](
        logits,
        slots,
        temperature,
        weights,
        thresholds.values,
        thresholds.last_ids,
        logits.shape[1],
        logits.stride(0),
        num_chunks,
        CHUNK=CHUNK,
        HAS_THRESHOLDS=True,
        num_warps=WEIGH_WARPS,
        **dependent_launch(logits.device),
    )


@triton.jit
def _inverse(temperature):
    return tl.where(temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)


@triton.jit
def _kept(logit, tokens, threshold, last_id):
    """Returns the logits that a row keeps, and -inf for the others. A threshold of -inf keeps all."""
    is_kept = (logit > threshold) | ((logit == threshold) & (tokens <= last_id)) | (logit != logit)
    return tl.where(is_kept, logit, float("-inf"))


@triton.jit
def _weigh(
    logits,
    slots,
    temperature,
    weights,
    thresholds,
    last_ids,
    vocab_size,
    stride,
    num_chunks,
    CHUNK: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if HAS_THRESHOLDS:
        threshold = tl.load(thresholds + row)
        last_id = tl.load(last_ids + row)
        if threshold == float("-inf"):
            return  # weighed already
        if tl.load(weights + (row * num_chunks + chunk) * 2) < threshold:
            tl.store(weights + (row * num_chunks + chunk) * 2, float("-inf"))
            tl.store(weights + (row * num_chunks + chunk) * 2 + 1, 0.0)
            return
    slot = tl.load(slots + row).to(tl.int64)
    scale = _inverse(tl.load(temperature + slot).to(tl.float32)) * 1.4426950408889634
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < vocab_size
    logit = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_THRESHOLDS:
        logit = _kept(logit, tokens, threshold, last_id)
    top = tl.max(logit)
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((logit - floor) * scale))
    at = weights + (row * num_chunks + chunk) * 2
    tl.store(at, tl.where(total != total, float("nan"), top))
    tl.store(at + 1, total)


@triton.jit
def _uniforms(seed, position):
    """Returns two numbers in [0, 1) from Philox-4x32-10 with the seed as key and the position as counter."""
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
    slots,
    lens,
    temperature,
    seed,
    weights,
    thresholds,
    last_ids,
    sampled,
    flags,
    vocab_size,
    stride,
    num_chunks,
    CHUNK: tl.constexpr,
    HAS_THRESHOLDS: tl.constexpr,
    LENS_OF_BATCH: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temp = tl.load(temperature + slot).to(tl.float32)
    scale = _inverse(temp) * 1.4426950408889634
    chunks = tl.arange(0, CHUNKS_BLOCK)
    inside = chunks < num_chunks
    at = weights + (row * num_chunks + chunks) * 2
    tops = tl.load(at, mask=inside, other=float("-inf"))
    totals = tl.load(at + 1, mask=inside, other=0.0)
    broken = tl.sum((tops != tops).to(tl.int32))
    best, best_chunk = tl.max(tops, axis=0, return_indices=True)
    broken += (tl.abs(best) == float("inf")).to(tl.int32)
    tl.store(flags + row, tl.where(broken > 0, 3, 0).to(tl.uint8))
    if broken > 0:
        tl.store(sampled + row, tl.full([], 0, tl.int64))
        return
    length = tl.load(lens + row) if LENS_OF_BATCH else tl.load(lens + slot)
    one, two = _uniforms(tl.load(seed + slot), length)
    masses = tl.where(inside, totals * tl.exp2((tops - best) * scale), 0.0)
    running = tl.cumsum(masses, axis=0)
    goal = one * tl.sum(masses)
    chunk = tl.sum(((running <= goal) & inside).to(tl.int32))
    last = tl.max(tl.where(masses > 0.0, chunks, 0))
    chunk = tl.where(temp == 0.0, best_chunk, tl.minimum(chunk, last))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    known = tokens < vocab_size
    logit = tl.load(logits + row * stride + tokens, mask=known, other=float("-inf")).to(tl.float32)
    if HAS_THRESHOLDS:
        logit = _kept(logit, tokens, tl.load(thresholds + row), tl.load(last_ids + row))
    top, token = tl.max(logit, axis=0, return_indices=True)
    if temp > 0.0:
        weight = tl.exp2((logit - top) * scale)
        inner = tl.cumsum(weight, axis=0)
        goal = two * tl.sum(weight)
        last = tl.max(tl.where(weight > 0.0, tl.arange(0, CHUNK), 0))
        token = tl.minimum(tl.sum((inner <= goal).to(tl.int32)), last)
    tl.store(sampled + row, (chunk * CHUNK + token).to(tl.int64))
