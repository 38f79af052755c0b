"""The rows' own steps on the GPU: what a decode step computes, and what its draw changes. No host in between.

Numbers that differ from step to step are not specialized: a kernel compiled for one write alone, when a step first has
only one, would stop the GPU for half a second.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_WRITES = 1024


def prepare_decode(
    rows: Tensor,  # [B] int32
    tokens: Tensor,  # [num_rows, max_len] int32
    computed: Tensor,  # [num_rows] int64
    block_tables: Tensor,  # [num_rows, max_blocks] int32
    block_size: int,
    token_ids: Tensor,  # [B] int32, out
    positions: Tensor,  # [B] int64, out
    slot_mapping: Tensor,  # [B] int64, out
    context_lens: Tensor,  # [B] int32, out
) -> None:
    """The next token of each row and where its key and value go."""
    num_rows = rows.shape[0]
    _prepare[(triton.cdiv(num_rows, _BLOCK),)](
        rows,
        tokens,
        computed,
        block_tables,
        token_ids,
        positions,
        slot_mapping,
        context_lens,
        num_rows,
        tokens.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _prepare(
    rows,
    tokens,
    computed,
    block_tables,
    token_ids,
    positions,
    slot_mapping,
    context_lens,
    num_rows,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    position = tl.load(computed + row, mask=inside, other=0)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(token_ids + place, tl.load(tokens + row * token_stride + position, mask=inside, other=0), mask=inside)
    tl.store(positions + place, position, mask=inside)
    tl.store(slot_mapping + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
    tl.store(context_lens + place, (position + 1).to(tl.int32), mask=inside)


def write_tables(block_tables: Tensor, rows: Tensor, indexes: Tensor, blocks: Tensor) -> None:
    """block_tables[rows, indexes] = blocks; all int32."""
    num_writes = rows.shape[0]
    _write_tables[(triton.cdiv(num_writes, _WRITES),)](
        block_tables, rows, indexes, blocks, num_writes, block_tables.stride(0), BLOCK=_WRITES, num_warps=4
    )


@triton.jit(do_not_specialize=["num_writes"])
def _write_tables(block_tables, rows, indexes, blocks, num_writes, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_writes
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    index = tl.load(indexes + place, mask=inside, other=0)
    tl.store(block_tables + row * stride + index, tl.load(blocks + place, mask=inside, other=0), mask=inside)


def admit(
    columns: Tensor,  # [4, A] int32: row, tokens, how many of them are computed, where the first is in `prompts`
    prompts: Tensor,  # int32, one after the other
    most_tokens: int,  # of one of them
    tokens: Tensor,  # [num_rows, max_len] int32
    lens: Tensor,  # [num_rows] int64
    computed: Tensor,  # [num_rows] int64
    is_finished: Tensor,  # [num_rows] bool
) -> None:
    """Rows get their new owners' tokens."""
    num_admitted = columns.shape[1]
    _admit[(num_admitted, triton.cdiv(most_tokens, _WRITES))](
        columns,
        prompts,
        tokens,
        lens,
        computed,
        is_finished,
        num_admitted,
        tokens.stride(0),
        BLOCK=_WRITES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_admitted"])
def _admit(columns, prompts, tokens, lens, computed, is_finished, num_admitted, token_stride, BLOCK: tl.constexpr):
    number, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(columns + number).to(tl.int64)
    length = tl.load(columns + num_admitted + number)
    start = tl.load(columns + 3 * num_admitted + number)
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    tl.store(tokens + row * token_stride + place, tl.load(prompts + start + place, mask=inside, other=0), mask=inside)
    if part == 0:
        tl.store(lens + row, length.to(tl.int64))
        tl.store(computed + row, tl.load(columns + 2 * num_admitted + number).to(tl.int64))
        tl.store(is_finished + row, False)


def append_tokens(
    rows: Tensor,  # [B] int32, those that drew
    drawn: Tensor,  # [B] int64
    flags: Tensor,  # [B] uint8, how each row stands by the draw itself (steps.BROKEN or 0)
    tokens: Tensor,  # [num_rows, max_len] int32
    lens: Tensor,  # [num_rows] int64
    is_finished: Tensor,  # [num_rows] bool
    end_len: Tensor,  # [num_rows] int64
    stop_token_ids: Tensor,  # [num_rows, width] int64
    out: Tensor,  # [2, B] int32: the token and how the row stands now
    *,
    advances: Tensor | None,  # [num_rows] int64 computed, if the step was one token each
) -> None:
    """The drawn tokens become the rows' last; a row that ends, or has ended, stands still."""
    num_rows = rows.shape[0]
    _append[(triton.cdiv(num_rows, _BLOCK),)](
        rows,
        drawn,
        flags,
        tokens,
        lens,
        is_finished,
        end_len,
        stop_token_ids,
        out,
        lens if advances is None else advances,
        num_rows,
        tokens.stride(0),
        out.stride(0),
        MAX_LEN=tokens.shape[1],
        NUM_STOPS=stop_token_ids.shape[1],
        ADVANCES=advances is not None,
        BLOCK=_BLOCK,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["num_rows", "out_stride"])
def _append(
    rows,
    drawn,
    flags,
    tokens,
    lens,
    is_finished,
    end_len,
    stop_token_ids,
    out,
    computed,
    num_rows,
    token_stride,
    out_stride,
    MAX_LEN: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    ADVANCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    was_finished = tl.load(is_finished + row, mask=inside, other=1) != 0
    token = tl.load(drawn + place, mask=inside, other=0)
    length = tl.load(lens + row, mask=inside, other=0)
    stops = tl.load(
        stop_token_ids + row[:, None] * NUM_STOPS + tl.arange(0, NUM_STOPS)[None, :], mask=inside[:, None], other=-1
    )
    is_stop = tl.sum((stops == token[:, None]).to(tl.int32), axis=1) > 0
    is_full = length + 1 >= tl.load(end_len + row, mask=inside, other=0)
    standing = tl.where(is_stop, 1, tl.where(is_full, 2, 0))
    flag = tl.load(flags + place, mask=inside, other=0).to(tl.int32)
    standing = tl.where(flag != 0, flag, standing)
    goes_on = inside & (was_finished == 0)
    tl.store(tokens + row * token_stride + length, token.to(tl.int32), mask=goes_on & (length < MAX_LEN))
    tl.store(lens + row, length + 1, mask=goes_on)
    tl.store(is_finished + row, (standing != 0), mask=goes_on)
    if ADVANCES:
        at = tl.load(computed + row, mask=inside, other=0)
        tl.store(computed + row, at + 1, mask=goes_on)
    tl.store(out + place, token.to(tl.int32), mask=inside)
    tl.store(out + out_stride + place, standing, mask=inside)
