"""Attention over the paged cache. A task is one kv head of one sequence for a tile of its query tokens.

    queries  [rows, D]      rows = tokens of the tile x query heads that share the kv head, padded to ROWS
    keys     [D, tokens]    LANES keys are one register: a score needs no sum across lanes
    values   [tokens, Dv]   columns in chunks of two registers; the last chunk is moved back to end at Dv

Keys that are stored as [tokens, D], which is the case for latents, are first transposed, KEYS at a time.
Numbers that are narrower than float32 are widened in registers for few rows, and once in memory for many.
For each KEYS positions: scores, softmax with a running maximum, then weights times values. Positions after the last
token may hold anything: their scores are overwritten, their values never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.cpu.cache_formats import (
    FLOAT16_SIZE,
    FLOAT32_SIZE,
    LOADS,
    LoadAt,
    format_of,
    take_numbers,
    widen,
)
from headrace.kernels.cpu.launch import Arguments, arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, address_of, after, floats, inner, int32s
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
FEW_ROWS = 8  # with at most this many rows attention is memory-bound, with more it is compute-bound
AHEAD = 2 * PAIR  # keys that are prefetched before they are read
CACHE_LINE = 64  # bytes
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
    of_keys, of_values = format_of(cache.keys), format_of(cache.values)
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
        0 if cache.key_units is None else cache.key_units,
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
        of_keys.size,
        of_keys.shift,
        of_values.shift,
        tile_len,
        _NO_WINDOW if window is None else window,
        int(slides),
        scale * of_keys.factor,
        of_values.factor,
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
    key_units="pointer",
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
    size="integer",
    key_shift="integer",
    value_shift="integer",
    tile_len="integer",
    window="integer",
    slides="integer",
    scale="float",
    value_factor="float",
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
    return padded * (head_dim + KEYS + chunks * PAIR + 2) + KEYS * max(head_dim, PAIR)


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
    wide = after(totals, padded)  # keys and values that are copied before they are read: see `_packs`, `_widens`

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
    if padded <= FEW_ROWS:
        _prefetch(a, a.keys, table, kv_head, begin, min(begin + AHEAD, end))
    for start in range(begin, end, KEYS):
        num_keys = min(KEYS, end - start)
        if _packs(a):
            _pack_keys(a, wide, table, kv_head, start, num_keys)
        _score(a, queries, scores, wide, table, kv_head, start, end, first_position, padded)
        _soften(a, scores, sums, maxima, totals, kv_head, start, num_keys, first_position, num_rows, padded)
        if _widens(a, padded):
            _mix_widened(a, scores, sums, wide, table, kv_head, start, num_keys, first_position, padded)
        else:
            _mix(a, scores, sums, table, kv_head, start, num_keys, first_position, padded)
    _write(a, sums, totals, first_token, num_rows, padded, kv_head)


@inner
def _take_queries(a: Arguments, queries: Pointer, first_token: int, num_rows: int, padded: int, kv_head: int) -> None:
    q = floats(a.q)
    scale = a.scale
    if a.key_units != 0:
        scale *= floats(a.key_units)[kv_head]
    for row in range(num_rows):
        source = (first_token + row // a.group) * a.q_stride + (kv_head * a.group + row % a.group) * a.head_dim
        for d in range(a.head_dim):
            queries[row * a.head_dim + d] = q[source + d] * scale
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
def _widens(a: Arguments, padded: int) -> bool:
    """Whether keys and values are copied to float32 before they are read: narrower ones that meet many rows."""
    widens: bool = a.size != FLOAT32_SIZE and padded > FEW_ROWS
    return widens


@inner
def _pack_keys(a: Arguments, packed: Pointer, table: Pointer, kv_head: int, start: int, num_keys: int) -> None:
    for key in range(num_keys):
        block, offset = table[(start + key) // a.block_size], (start + key) % a.block_size
        source, step = (block * a.num_kv_heads + kv_head) * a.head_dim * a.block_size + offset, a.block_size
        if a.is_plain != 0:
            source, step = source - offset + offset * a.head_dim, 1
        target = after(packed, key)
        take_numbers(a.keys + source * a.size, step, a.head_dim, a.size, a.key_shift, target, KEYS)


@inner
def _key_address(a: Arguments, table: Pointer, kv_head: int, position: int) -> int:
    """Returns where the first dimension of a key is; the next dimension is block_size numbers further."""
    block, offset = table[position // a.block_size], position % a.block_size
    address: int = a.keys + ((block * a.num_kv_heads + kv_head) * a.head_dim * a.block_size + offset) * a.size
    return address


@inner
def _widen_keys(a: Arguments, wide: Pointer, table: Pointer, kv_head: int, position: int, num_keys: int) -> None:
    """Widens the keys of PAIR positions to [D, PAIR], or of LANES if there are no more."""
    for lane in range(0, min(num_keys, PAIR), LANES):
        address = _key_address(a, table, kv_head, position + lane)
        widen(address, a.block_size, a.size, a.key_shift, after(wide, lane), PAIR, a.head_dim)


@inner
def _prefetch(a: Arguments, side: int, table: Pointer, kv_head: int, begin: int, end: int) -> None:
    """Prefetches keys or values of the positions from `begin` on, a multiple of LANES, to `end`: blocks are scattered,
    so the hardware cannot predict them."""
    block_bytes = a.head_dim * a.block_size * a.size
    for position in range(begin, end, a.block_size):
        source = side + (table[position // a.block_size] * a.num_kv_heads + kv_head) * block_bytes
        for i in range(0, block_bytes, CACHE_LINE):
            prefetch(floats(source + i), 0)


@inner
def _score(
    a: Arguments,
    queries: Pointer,
    scores: Pointer,
    wide: Pointer,
    table: Pointer,
    kv_head: int,
    start: int,
    end: int,
    first_position: int,
    padded: int,
) -> None:
    """Multiplies queries with the keys from `start` on, at most KEYS of them. `end`: of all keys of this task."""
    num_keys = min(KEYS, end - start)
    for key in range(0, num_keys, PAIR):
        second = LANES if key + LANES < num_keys else 0
        if padded <= FEW_ROWS:
            ahead = start + key + AHEAD
            _prefetch(a, a.values, table, kv_head, start + key, min(start + key + PAIR, end))
            _prefetch(a, a.keys, table, kv_head, ahead, min(ahead + PAIR, end))
        size, shift = FLOAT32_SIZE, 0
        if _packs(a):
            left, right, stride = address_of(wide, key), address_of(wide, key + second), KEYS
        elif _widens(a, padded):
            _widen_keys(a, wide, table, kv_head, start + key, num_keys - key)
            left, right, stride = address_of(wide, 0), address_of(wide, second), PAIR
        else:
            left = _key_address(a, table, kv_head, start + key)
            right = _key_address(a, table, kv_head, start + key + second)
            stride, size, shift = a.block_size, a.size, a.key_shift
        for row in range(0, padded, ROWS):
            if key < _visible(a, start, num_keys, first_position, row + ROWS - 1):
                line, target = after(queries, row * a.head_dim), after(scores, row * KEYS + key)
                if size == FLOAT32_SIZE:
                    _score_rows(line, target, left, right, stride, a.head_dim, shift)
                elif size == FLOAT16_SIZE:
                    _score_rows_float16(line, target, left, right, stride, a.head_dim, shift)
                else:
                    _score_rows_bytes(line, target, left, right, stride, a.head_dim, shift)


def _scoring(load_at: LoadAt) -> Callable[..., None]:
    @inner
    def score_rows(
        queries: Pointer, scores: Pointer, left: int, right: int, stride: int, head_dim: int, shift: int
    ) -> None:
        """Multiplies ROWS queries with two registers of keys, given as addresses."""
        s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = splat(0.0)
        for d in range(head_dim):
            k0, k1 = load_at(left, d * stride, shift), load_at(right, d * stride, shift)
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

    return score_rows


_score_rows, _score_rows_float16, _score_rows_bytes = map(_scoring, LOADS)


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
    for chunk in range((a.value_dim + PAIR - 1) // PAIR):
        column = min(chunk * PAIR, a.value_dim - PAIR)
        for row in range(0, padded, ROWS):
            line = after(sums, (chunk * padded + row) * PAIR)
            visible = _visible(a, start, num_keys, first_position, row + ROWS - 1)
            key = 0
            while key < visible:
                source = _value_address(a, table, kv_head, start + key, column)
                length = min(a.block_size - (start + key) % a.block_size, visible - key)
                these = after(weights, row * KEYS + key)
                if a.size == FLOAT32_SIZE:
                    _mix_rows(these, source, line, length, a.value_stride, a.value_shift)
                elif a.size == FLOAT16_SIZE:
                    _mix_rows_float16(these, source, line, length, a.value_stride, a.value_shift)
                else:
                    _mix_rows_bytes(these, source, line, length, a.value_stride, a.value_shift)
                key += length


@inner
def _mix_widened(
    a: Arguments,
    weights: Pointer,
    sums: Pointer,
    wide: Pointer,
    table: Pointer,
    kv_head: int,
    start: int,
    num_keys: int,
    first_position: int,
    padded: int,
) -> None:
    """The same with values that are widened first, a chunk of columns for all rows."""
    for chunk in range((a.value_dim + PAIR - 1) // PAIR):
        column = min(chunk * PAIR, a.value_dim - PAIR)
        key = 0
        while key < num_keys:
            source = _value_address(a, table, kv_head, start + key, column)
            length = min(a.block_size - (start + key) % a.block_size, num_keys - key)
            for lane in range(0, PAIR, LANES):
                target = after(wide, key * PAIR + lane)
                widen(source + lane * a.size, a.value_stride, a.size, a.value_shift, target, PAIR, length)
            key += length
        for row in range(0, padded, ROWS):
            line = after(sums, (chunk * padded + row) * PAIR)
            visible = _visible(a, start, num_keys, first_position, row + ROWS - 1)
            _mix_rows(after(weights, row * KEYS), address_of(wide, 0), line, visible, PAIR, 0)


@inner
def _value_address(a: Arguments, table: Pointer, kv_head: int, position: int, column: int) -> int:
    """Returns where a column of a value is; the value of the next position in the block is value_stride numbers
    further."""
    block, offset = table[position // a.block_size], position % a.block_size
    row = (block * a.num_kv_heads + kv_head) * a.block_size + offset
    address: int = a.values + (row * a.value_stride + column) * a.size
    return address


def _mixing(load_at: LoadAt) -> Callable[..., None]:
    @inner
    def mix_rows(weights: Pointer, values: int, sums: Pointer, length: int, stride: int, shift: int) -> None:
        """Adds `length` values, two registers of each, to ROWS rows. `values` is an address."""
        s00, s01 = load(sums, 0), load(sums, LANES)
        s10, s11 = load(sums, PAIR), load(sums, PAIR + LANES)
        s20, s21 = load(sums, 2 * PAIR), load(sums, 2 * PAIR + LANES)
        s30, s31 = load(sums, 3 * PAIR), load(sums, 3 * PAIR + LANES)
        for t in range(length):
            v0, v1 = load_at(values, t * stride, shift), load_at(values, t * stride + LANES, shift)
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

    return mix_rows


_mix_rows, _mix_rows_float16, _mix_rows_bytes = map(_mixing, LOADS)


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
            share = splat(a.value_factor / totals[row])
            store(target, 0, multiply(load(line, 0), share))
            store(target, LANES, multiply(load(line, LANES), share))
