"""Attention over the paged cache. A task is one kv head of one sequence for a tile of its query tokens.

    queries  [rows, D]      rows = tokens of the tile x query heads that share the kv head, padded to ROWS
    keys     [D, tokens]    LANES keys are one register: a score needs no sum across lanes
    values   [tokens, Dv]   columns in chunks of two registers; the last chunk is moved back to end at Dv

Keys that are stored as [tokens, D], which is the case for latents, are first transposed, KEYS at a time.
For each KEYS positions: scores, softmax with a running maximum, then weights times values. Positions after the last
token may hold anything: their scores are overwritten, their values never read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.cpu.launch import Arguments, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, after, floats, inner, int32s
from headrace.kernels.cpu.rope import is_token_innermost
from headrace.kernels.cpu.vectors import (
    LANES,
    add,
    divide,
    exp,
    fma,
    lanes_from,
    largest,
    load,
    maximum,
    multiply,
    only_lanes,
    prefetch,
    splat,
    store,
    subtract,
    total,
)
from headrace.kernels.layout import LayerCache, StepLayout

ROWS = 4  # with two registers of columns each, eight sums in flight: enough to hide the latency of a multiply-add
PAIR = 2 * LANES
KEYS = 128  # positions per update of the running maximum
TILE_ROWS = 48  # target rows per task: few enough for its scratch to stay in the L1 cache
PREFETCH_ROWS = 8  # with at most this many rows attention is memory-bound, with more it is compute-bound
CACHE_LINE = 16  # floats
_NO_WINDOW = 2**62


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> Tensor:  # [T, Hq * Dv]
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = cache.keys.shape[1:3]
    value_dim = cache.values.shape[3]
    if value_dim < PAIR or not _is_readable(cache) or q.stride(2) != 1 or q.stride(1) != head_dim:
        return reference.paged_attention(
            q, cache, layout, scale, window, softcap, slides=slides, sinks=sinks, slopes=slopes
        )
    group = num_heads // num_kv_heads
    tile_len = max(1, min(TILE_ROWS // group, layout.max_query_len))
    out = torch.empty((num_tokens, num_heads * value_dim), dtype=q.dtype)
    if num_tokens == 0:
        return out
    _attend(
        q,
        cache.keys,
        cache.values,
        out,
        layout.query_starts,
        layout.context_lens,
        layout.slots,
        layout.block_tables,
        0 if sinks is None else sinks,
        0 if slopes is None else slopes,
        layout.block_tables.stride(0),
        layout.num_seqs,
        q.stride(0),
        group,
        num_kv_heads,
        head_dim,
        value_dim,
        cache.values.stride(2),
        int(not is_token_innermost(cache.keys)),
        block_size,
        tile_len,
        _NO_WINDOW if window is None else window,
        int(slides),
        scale,
        0.0 if softcap is None else softcap,
        num_tasks=num_kv_heads * max(layout.num_seqs, num_tokens // tile_len),
    )
    return out


def latent_attention(q: Tensor, cache: LayerCache, layout: StepLayout, scale: float) -> Tensor:
    """See `ops.latent_attention`."""
    return paged_attention(q, cache, layout, scale).view(*q.shape[:2], -1)


def _is_readable(cache: LayerCache) -> bool:
    """Whether keys are stored in one of the two orders, and values as rows, of which only the first columns may be
    used."""
    _, num_kv_heads, block_size, _ = cache.values.shape
    row = cache.values.stride(2)
    has_rows = cache.values.stride() == (num_kv_heads * block_size * row, block_size * row, row, 1)
    return has_rows and (is_token_innermost(cache.keys) or cache.keys.is_contiguous())


@kernel(
    q="pointer",
    keys="pointer",
    values="pointer",
    out="pointer",
    query_starts="pointer",
    context_lens="pointer",
    slots="pointer",
    block_tables="pointer",
    sinks="pointer",
    slopes="pointer",
    table_stride="integer",
    num_seqs="integer",
    q_stride="integer",
    group="integer",
    num_kv_heads="integer",
    head_dim="integer",
    value_dim="integer",
    value_stride="integer",
    is_plain="integer",
    block_size="integer",
    tile_len="integer",
    window="integer",
    slides="integer",
    scale="float",
    softcap="float",
)
def _attend(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    query_starts = int32s(a.query_starts)
    scratch = np.empty(_scratch_len(a.tile_len * a.group, a.head_dim, a.value_dim), dtype=np.float32)
    # Tasks are claimed in order, so the search for a task's sequence continues from the last one.
    seq, first_task = 0, 0
    num_tiles = (query_starts[1] - query_starts[0] + a.tile_len - 1) // a.tile_len
    task = claim(pointer)
    while True:
        while seq < a.num_seqs and task >= first_task + num_tiles * a.num_kv_heads:
            first_task += num_tiles * a.num_kv_heads
            seq += 1
            if seq < a.num_seqs:
                num_tiles = (query_starts[seq + 1] - query_starts[seq] + a.tile_len - 1) // a.tile_len
        if seq >= a.num_seqs:
            break
        kv_head, tile = divmod(task - first_task, num_tiles)
        _attend_tile(a, floats(scratch.ctypes.data), seq, kv_head, tile)
        task = claim(pointer)


@inner
def _scratch_len(num_rows: int, head_dim: int, value_dim: int) -> int:
    padded = (num_rows + ROWS - 1) // ROWS * ROWS
    chunks = (value_dim + PAIR - 1) // PAIR
    return padded * (head_dim + KEYS + chunks * PAIR + 2) + KEYS * head_dim


@inner
def _attend_tile(a: Arguments, scratch: Pointer, seq: int, kv_head: int, tile: int) -> None:
    query_start, context_len = int32s(a.query_starts)[seq], int32s(a.context_lens)[seq]
    query_len = int32s(a.query_starts)[seq + 1] - query_start
    num_tokens = min(a.tile_len, query_len - tile * a.tile_len)
    first_token = query_start + tile * a.tile_len
    first_position = context_len - query_len + tile * a.tile_len
    num_rows = num_tokens * a.group
    padded = (num_rows + ROWS - 1) // ROWS * ROWS

    queries = scratch  # [padded, D]
    scores = after(queries, padded * a.head_dim)  # [padded, KEYS]
    sums = after(scores, padded * KEYS)  # [chunks, padded, PAIR]
    maxima = after(sums, padded * ((a.value_dim + PAIR - 1) // PAIR) * PAIR)  # [padded]
    totals = after(maxima, padded)  # [padded]
    packed = after(totals, padded)  # [D, KEYS]: see `_packs`

    _take_queries(a, queries, first_token, num_rows, padded, kv_head)
    for row in range(padded):
        maxima[row] = -np.inf
        totals[row] = 0.0
    if a.sinks != 0:  # a score of each row before all others
        for row in range(num_rows):
            maxima[row] = floats(a.sinks)[kv_head * a.group + row % a.group]
            totals[row] = 1.0
    for i in range(padded * ((a.value_dim + PAIR - 1) // PAIR) * PAIR):
        sums[i] = 0.0

    table = after(int32s(a.block_tables), int32s(a.slots)[seq] * a.table_stride)
    end = first_position + num_tokens
    begin = _first_seen(a, first_position) // KEYS * KEYS
    for start in range(begin, end, KEYS):
        num_keys = min(KEYS, end - start)
        if _packs(a):
            _pack_keys(a, packed, table, kv_head, start, num_keys)
        _score(a, queries, scores, packed, table, kv_head, start, num_keys, first_position, padded)
        _soften(a, scores, sums, maxima, totals, kv_head, start, num_keys, first_position, num_rows, padded)
        _mix(a, scores, sums, table, kv_head, start, num_keys, first_position, padded)
    _write(a, sums, totals, first_token, num_rows, padded, kv_head)


@inner
def _take_queries(a: Arguments, queries: Pointer, first_token: int, num_rows: int, padded: int, kv_head: int) -> None:
    q = floats(a.q)
    for row in range(num_rows):
        source = (first_token + row // a.group) * a.q_stride + (kv_head * a.group + row % a.group) * a.head_dim
        for d in range(a.head_dim):
            queries[row * a.head_dim + d] = q[source + d] * a.scale
    for i in range(num_rows * a.head_dim, padded * a.head_dim):
        queries[i] = 0.0


@inner
def _first_seen(a: Arguments, position: int) -> int:
    """Returns the first position that a token attends to. A window slides with the token, or advances in whole
    chunks."""
    first: int = max(0, position - a.window + 1)
    if a.slides == 0:
        first = position // a.window * a.window
    return first


@inner
def _visible(a: Arguments, start: int, num_keys: int, first_position: int, row: int) -> int:
    """Returns how many of the keys from `start` on this row's token sees; a window may hide some of the first."""
    num_visible: int = min(num_keys, first_position + row // a.group + 1 - start)
    return max(0, num_visible)


@inner
def _packs(a: Arguments) -> bool:
    """Whether keys are copied before they are read: if they are stored as rows, or in blocks that split a register."""
    packs: bool = a.is_plain != 0 or a.block_size % LANES != 0
    return packs


@inner
def _pack_keys(a: Arguments, packed: Pointer, table: Pointer, kv_head: int, start: int, num_keys: int) -> None:
    keys = floats(a.keys)
    for key in range(num_keys):
        block, offset = table[(start + key) // a.block_size], (start + key) % a.block_size
        source, step = (block * a.num_kv_heads + kv_head) * a.head_dim * a.block_size + offset, a.block_size
        if a.is_plain != 0:
            source, step = source - offset + offset * a.head_dim, 1
        for d in range(a.head_dim):
            packed[d * KEYS + key] = keys[source + d * step]


@inner
def _keys_at(a: Arguments, packed: Pointer, table: Pointer, kv_head: int, start: int, key: int) -> Pointer:
    """Returns where the first dimension of LANES keys is; the next dimension is block_size (packed: KEYS) further."""
    if _packs(a):
        return after(packed, key)
    block, offset = table[(start + key) // a.block_size], (start + key) % a.block_size
    return after(floats(a.keys), (block * a.num_kv_heads + kv_head) * a.head_dim * a.block_size + offset)


@inner
def _prefetch(a: Arguments, table: Pointer, kv_head: int, start: int, key: int, num_keys: int) -> None:
    """Prefetches the values of the current keys and the next keys: blocks are scattered, so the hardware cannot
    predict them."""
    keys, values = floats(a.keys), floats(a.values)
    block_len = a.head_dim * a.block_size
    for first in range(key, min(key + PAIR, num_keys), a.block_size):
        source = (table[(start + first) // a.block_size] * a.num_kv_heads + kv_head) * block_len
        for i in range(0, block_len, CACHE_LINE):
            prefetch(values, source + i)
    for first in range(key + PAIR, min(key + 2 * PAIR, num_keys), a.block_size):
        source = (table[(start + first) // a.block_size] * a.num_kv_heads + kv_head) * block_len
        for i in range(0, block_len, CACHE_LINE):
            prefetch(keys, source + i)


@inner
def _score(
    a: Arguments,
    queries: Pointer,
    scores: Pointer,
    packed: Pointer,
    table: Pointer,
    kv_head: int,
    start: int,
    num_keys: int,
    first_position: int,
    padded: int,
) -> None:
    stride = KEYS if _packs(a) else a.block_size
    for key in range(0, num_keys, PAIR):
        left = _keys_at(a, packed, table, kv_head, start, key)
        right = left
        if key + LANES < num_keys:
            right = _keys_at(a, packed, table, kv_head, start, key + LANES)
        if padded <= PREFETCH_ROWS:
            _prefetch(a, table, kv_head, start, key, num_keys)
        for row in range(0, padded, ROWS):
            if key < _visible(a, start, num_keys, first_position, row + ROWS - 1):
                _score_rows(
                    after(queries, row * a.head_dim),
                    after(scores, row * KEYS + key),
                    left,
                    right,
                    stride,
                    a.head_dim,
                )


@inner
def _score_rows(queries: Pointer, scores: Pointer, left: Pointer, right: Pointer, stride: int, head_dim: int) -> None:
    """Multiplies ROWS queries with two registers of keys."""
    s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = splat(0.0)
    for d in range(head_dim):
        k0, k1 = load(left, d * stride), load(right, d * stride)
        q0, q1 = splat(queries[d]), splat(queries[head_dim + d])
        q2, q3 = splat(queries[2 * head_dim + d]), splat(queries[3 * head_dim + d])
        s00, s01 = fma(q0, k0, s00), fma(q0, k1, s01)
        s10, s11 = fma(q1, k0, s10), fma(q1, k1, s11)
        s20, s21 = fma(q2, k0, s20), fma(q2, k1, s21)
        s30, s31 = fma(q3, k0, s30), fma(q3, k1, s31)
    store(scores, 0, s00)
    store(scores, LANES, s01)
    store(scores, KEYS, s10)
    store(scores, KEYS + LANES, s11)
    store(scores, 2 * KEYS, s20)
    store(scores, 2 * KEYS + LANES, s21)
    store(scores, 3 * KEYS, s30)
    store(scores, 3 * KEYS + LANES, s31)


@inner
def _soften(
    a: Arguments,
    scores: Pointer,
    sums: Pointer,
    maxima: Pointer,
    totals: Pointer,
    kv_head: int,
    start: int,
    num_keys: int,
    first_position: int,
    num_rows: int,
    padded: int,
) -> None:
    """Turns scores into softmax weights relative to the running maximum, and rescales the sums so far."""
    for row in range(num_rows):
        line = after(scores, row * KEYS)
        end = _visible(a, start, num_keys, first_position, row)
        position = first_position + row // a.group
        begin = max(0, _first_seen(a, position) - start)
        slope: Any = np.float32(0.0)
        if a.slopes != 0:
            slope = floats(a.slopes)[kv_head * a.group + row % a.group]
        highest = _mask_row(line, begin, end, num_keys, a.softcap, slope, start - position)
        if highest == -np.inf:  # this row sees none of these keys
            for i in range(0, num_keys, LANES):
                store(line, i, splat(0.0))
            continue
        new_maximum = max(maxima[row], highest)
        shrink = math.exp(maxima[row] - new_maximum)
        totals[row] = totals[row] * shrink + _exp_row(line, new_maximum, num_keys)
        if shrink != 1.0:
            _shrink_sums(sums, shrink, row, padded, (a.value_dim + PAIR - 1) // PAIR)
        maxima[row] = new_maximum


@inner
def _mask_row(line: Pointer, begin: int, end: int, num_keys: int, softcap: float, slope: float, distance: int) -> Any:
    """Hides all keys except begin..end-1 and returns the highest score, -inf if none is left. `distance` from the
    query to the first key is 0 or negative; times the slope it is the bias of ALiBi."""
    highest = splat(-np.inf)
    for i in range(0, num_keys, LANES):
        score = load(line, i)
        if softcap > 0.0:  # softcap * tanh(score / softcap)
            power = exp(multiply(score, splat(2.0 / softcap)))
            tanh = subtract(splat(1.0), divide(splat(2.0), add(power, splat(1.0))))
            score = multiply(tanh, splat(softcap))
        if slope != 0.0:
            score = fma(splat(slope), lanes_from(distance + i), score)
        score = only_lanes(score, begin - i, end - i, -np.inf)
        highest = maximum(highest, score)
        store(line, i, score)
    return largest(highest)


@inner
def _exp_row(line: Pointer, highest: float, num_keys: int) -> Any:
    weights = splat(0.0)
    for i in range(0, num_keys, LANES):
        weight = exp(subtract(load(line, i), splat(highest)))
        weights = add(weights, weight)
        store(line, i, weight)
    return total(weights)


@inner
def _shrink_sums(sums: Pointer, shrink: float, row: int, padded: int, num_chunks: int) -> None:
    for chunk in range(num_chunks):
        line = after(sums, (chunk * padded + row) * PAIR)
        store(line, 0, multiply(load(line, 0), splat(shrink)))
        store(line, LANES, multiply(load(line, LANES), splat(shrink)))


@inner
def _mix(
    a: Arguments,
    weights: Pointer,
    sums: Pointer,
    table: Pointer,
    kv_head: int,
    start: int,
    num_keys: int,
    first_position: int,
    padded: int,
) -> None:
    """Adds weights times values to the sums, one chunk of columns and ROWS rows at a time."""
    values = floats(a.values)
    for chunk in range((a.value_dim + PAIR - 1) // PAIR):
        column = min(chunk * PAIR, a.value_dim - PAIR)
        for row in range(0, padded, ROWS):
            line = after(sums, (chunk * padded + row) * PAIR)
            visible = _visible(a, start, num_keys, first_position, row + ROWS - 1)
            key = 0
            while key < visible:
                block, offset = table[(start + key) // a.block_size], (start + key) % a.block_size
                length = min(a.block_size - offset, visible - key)
                source = ((block * a.num_kv_heads + kv_head) * a.block_size + offset) * a.value_stride + column
                _mix_rows(after(weights, row * KEYS + key), after(values, source), line, length, a.value_stride)
                key += length


@inner
def _mix_rows(weights: Pointer, values: Pointer, sums: Pointer, length: int, stride: int) -> None:
    """Adds `length` values, two registers of each, to ROWS rows."""
    s00, s01 = load(sums, 0), load(sums, LANES)
    s10, s11 = load(sums, PAIR), load(sums, PAIR + LANES)
    s20, s21 = load(sums, 2 * PAIR), load(sums, 2 * PAIR + LANES)
    s30, s31 = load(sums, 3 * PAIR), load(sums, 3 * PAIR + LANES)
    for t in range(length):
        v0, v1 = load(values, t * stride), load(values, t * stride + LANES)
        w0, w1 = splat(weights[t]), splat(weights[KEYS + t])
        w2, w3 = splat(weights[2 * KEYS + t]), splat(weights[3 * KEYS + t])
        s00, s01 = fma(w0, v0, s00), fma(w0, v1, s01)
        s10, s11 = fma(w1, v0, s10), fma(w1, v1, s11)
        s20, s21 = fma(w2, v0, s20), fma(w2, v1, s21)
        s30, s31 = fma(w3, v0, s30), fma(w3, v1, s31)
    store(sums, 0, s00)
    store(sums, LANES, s01)
    store(sums, PAIR, s10)
    store(sums, PAIR + LANES, s11)
    store(sums, 2 * PAIR, s20)
    store(sums, 2 * PAIR + LANES, s21)
    store(sums, 3 * PAIR, s30)
    store(sums, 3 * PAIR + LANES, s31)


@inner
def _write(
    a: Arguments, sums: Pointer, totals: Pointer, first_token: int, num_rows: int, padded: int, kv_head: int
) -> None:
    out = floats(a.out)
    num_heads = a.num_kv_heads * a.group
    for row in range(num_rows):
        token, head = first_token + row // a.group, kv_head * a.group + row % a.group
        for chunk in range((a.value_dim + PAIR - 1) // PAIR):
            target = after(out, (token * num_heads + head) * a.value_dim + min(chunk * PAIR, a.value_dim - PAIR))
            line = after(sums, (chunk * padded + row) * PAIR)
            share = splat(1.0 / totals[row])
            store(target, 0, multiply(load(line, 0), share))
            store(target, LANES, multiply(load(line, LANES), share))
