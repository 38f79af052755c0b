"""The loop over keys of attention over the paged cache, for kernels with many query rows; and helpers of all of
them."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.gpu.e3m4 import key_in

NO_WINDOW = 1 << 30
LOG2E = 1.4426950408889634


@triton.jit
def first_seen(position, window, SLIDES: tl.constexpr):
    """Returns the first position that a token attends to. A window slides with the token, or advances in whole
    chunks."""
    if SLIDES:
        first = tl.maximum(0, position - window + 1)
    else:
        first = position // window * window
    return first


@triton.jit
def in_dot_dtype(query, keys):
    """Converts the query to the type of the dot products: float16 for an FP8 cache, because the GPU widens FP8 to
    float16, which represents every number of e4m3 (latents) and e3m4."""
    if keys.dtype.element_ty == tl.float8e4nv or keys.dtype.element_ty == tl.uint8:
        query = query.to(tl.float16)
    return query


@triton.jit
def cap_softly(score, softcap):
    """Maps scores, which are multiplied by log2(e), to softcap * tanh(score / softcap)."""
    capped = score * (0.6931471805599453 / softcap)
    return softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0))


@triton.jit
def softmax_step(highest, total, score):
    """Adds a tile of scores to the running softmax of rows. Returns the largest scores and sums of weights so far, the
    tile's weights, and the factor by which what was weighted before shrinks."""
    peak = tl.maximum(highest, tl.max(score, axis=1))
    floor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - floor[:, None])
    shrink = tl.exp2(highest - floor)
    total = total * shrink + tl.sum(weight, axis=1)
    return peak, total, weight, shrink


@triton.jit
def add_sink(highest, total, mixed, sink):
    """Adds a score without a value to rows of a softmax: their weights are rescaled if it is the largest."""
    score = sink * 1.4426950408889634
    peak = tl.maximum(highest, score)
    shrink = tl.exp2(highest - peak)
    return total * shrink + tl.exp2(score - peak), mixed * shrink[:, None]


@triton.jit
def add_bias(score, slope, positions, position):
    """Adds ALiBi's bias to scores of rows at `positions` and keys at `position`: slope times distance."""
    distance = (position[None, :] - positions[:, None]).to(tl.float32)
    return score + slope[:, None] * 1.4426950408889634 * distance


_WIDEN = """{
.reg .b32 bytes;
.reg .b16 two, none;
prmt.b32 bytes, $1, 0, %s;
mov.b32 {two, none}, bytes;
cvt.rn.f16x2.e4m3x2 $0, two;
}"""
_WIDEN_LOWER = tl.constexpr(_WIDEN % "0x4420")
_WIDEN_UPPER = tl.constexpr(_WIDEN % "0x4431")


@triton.jit
def widen_fp8(pairs, UPPER: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Converts the lower or upper bytes of 16-bit words from e4m3 to float16."""
    if IS_INTERPRETED:
        wide = ((pairs >> (8 if UPPER else 0)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        asm: tl.constexpr = _WIDEN_UPPER if UPPER else _WIDEN_LOWER
        wide = tl.inline_asm_elementwise(asm, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
    return wide


@triton.jit
def attend(
    query,
    keys,
    values,
    table,
    positions,
    begin,
    whole,
    end,
    kv_head,
    scale,
    window,
    softcap,
    slope,
    query_positions,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Runs query rows over the keys from `begin` to `end`. A row sees the keys up to its entry of `positions`.

    Returns for each row the largest score, the sum of the weights relative to it, and the values weighted by them. All
    rows see all keys before `whole`: without a window these need no mask.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    if not HAS_WINDOW:
        highest, total, mixed = _pass(
            highest, total, mixed, query, keys, values, table, positions, begin, whole, kv_head, scale, window, softcap,
            slope, query_positions, end, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, KEYS,
            False, HAS_WINDOW, SLIDES, HAS_SOFTCAP, HAS_SLOPES, IS_INTERPRETED,
        )  # fmt: skip
        begin = whole
    return _pass(
        highest, total, mixed, query, keys, values, table, positions, begin, end, kv_head, scale, window, softcap,
        slope, query_positions, end, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, BLOCK_SIZE, KEYS,
        True, HAS_WINDOW, SLIDES, HAS_SOFTCAP, HAS_SLOPES, IS_INTERPRETED,
    )  # fmt: skip


@triton.jit
def _pass(
    highest,
    total,
    mixed,
    query,
    keys,
    values,
    table,
    positions,
    begin,
    stop,
    kv_head,
    scale,
    window,
    softcap,
    slope,
    query_positions,
    end,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLIDES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Runs one pass over the keys from `begin` to `stop`, KEYS at a time."""
    tokens = tl.arange(0, KEYS)
    dims = tl.arange(0, DIM_BLOCK)
    firsts = positions
    if HAS_WINDOW:
        firsts = first_seen(positions, window, SLIDES)
    for start in tl.range(begin, stop, KEYS):
        position = start + tokens
        if IS_MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        line = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        at = line[:, None] + dims[None, :]
        if IS_MASKED or DIM_BLOCK != HEAD_DIM:
            is_inside = (position[:, None] < end) & (dims[None, :] < HEAD_DIM)
            key = tl.load(keys + at, mask=is_inside, other=0.0)
            value = tl.load(values + at, mask=is_inside, other=0.0)
        else:
            key = tl.load(keys + at)
            value = tl.load(values + at)
        score = tl.dot(query, tl.trans(key_in(query.dtype, key, IS_INTERPRETED))) * scale
        if HAS_SOFTCAP:
            score = cap_softly(score, softcap)
        if HAS_SLOPES:
            score = add_bias(score, slope, query_positions, position)
        if IS_MASKED:
            is_seen = position[None, :] <= positions[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[None, :] >= firsts[:, None])
            score = tl.where(is_seen, score, float("-inf"))
        peak, total, weight, shrink = softmax_step(highest, total, score)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype))
        highest = peak
    return highest, total, mixed
