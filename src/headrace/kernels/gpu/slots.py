"""The slots' state on the GPU: what a decode step reads from it and what its sampled tokens change, without the host.

Numbers that differ from step to step are not specialized. Otherwise Triton would compile a new kernel when a step first
has only one write, and the GPU would idle for half a second.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, wait_for_inputs

RING_PLACES = 16  # a power of two: turns may overflow
_BLOCK = 64
_WRITES = 1024


def prepare_decode(
    slots: Tensor,  # [B] int32, the slot of each row
    tokens: Tensor,  # [num_slots, max_len] int32
    computed: Tensor,  # [num_slots] int64
    block_tables: Tensor,  # [num_slots, max_blocks] int32
    block_size: int,
    token_ids: Tensor,  # [B] int32, out
    positions: Tensor,  # [B] int64, out
    slot_mapping: Tensor,  # [B] int64, out
    context_lens: Tensor,  # [B] int32, out
    offsets: Tensor | None = None,  # [B] int32, rows of a slot that computes several tokens: 0, 1, 2 ...; None: zeros
    drafts: Tensor | None = None,  # [B] int32, tokens of rows with an offset; -1: `tokens` has it
) -> None:
    """Reads the next input token of each slot, and computes where its key and value go. Drafts go to `tokens`."""
    batch_size = slots.shape[0]
    _prepare[(triton.cdiv(batch_size, _BLOCK),)](
        slots,
        tokens,
        computed,
        block_tables,
        token_ids,
        positions,
        slot_mapping,
        context_lens,
        slots if offsets is None else offsets,
        slots if drafts is None else drafts,
        batch_size,
        tokens.stride(0),
        block_tables.stride(0),
        HAS_OFFSETS=offsets is not None,
        HAS_DRAFTS=drafts is not None,
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["batch_size"])
def _prepare(
    slots,
    tokens,
    computed,
    block_tables,
    token_ids,
    positions,
    slot_mapping,
    context_lens,
    offsets,
    drafts,
    batch_size,
    token_stride,
    table_stride,
    HAS_OFFSETS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < batch_size
    slot = tl.load(slots + item, mask=inside, other=0).to(tl.int64)
    position = tl.load(computed + slot, mask=inside, other=0)
    offset = tl.zeros([BLOCK], tl.int32)
    if HAS_OFFSETS:
        offset = tl.load(offsets + item, mask=inside, other=0)
        position += offset
    block = tl.load(block_tables + slot * table_stride + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token_at = tokens + slot * token_stride + position
    token = tl.load(token_at, mask=inside, other=0)
    if HAS_DRAFTS:
        draft = tl.load(drafts + item, mask=inside & (offset > 0), other=-1)
        token = tl.where(draft >= 0, draft, token)
        tl.store(token_at, draft, mask=draft >= 0)
    tl.store(token_ids + item, token, mask=inside)
    tl.store(positions + item, position, mask=inside)
    tl.store(slot_mapping + item, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
    tl.store(context_lens + item, (position + 1).to(tl.int32), mask=inside)


def write_tables(block_tables: Tensor, slots: Tensor, indexes: Tensor, blocks: Tensor) -> None:
    """Sets block_tables[slots, indexes] = blocks; all int32."""
    num_writes = slots.shape[0]
    _write_tables[(triton.cdiv(num_writes, _WRITES),)](
        block_tables, slots, indexes, blocks, num_writes, block_tables.stride(0), BLOCK=_WRITES, num_warps=4
    )


@triton.jit(do_not_specialize=["num_writes"])
def _write_tables(block_tables, slots, indexes, blocks, num_writes, stride, BLOCK: tl.constexpr):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_writes
    slot = tl.load(slots + item, mask=inside, other=0).to(tl.int64)
    index = tl.load(indexes + item, mask=inside, other=0)
    tl.store(block_tables + slot * stride + index, tl.load(blocks + item, mask=inside, other=0), mask=inside)


def enter_slot(
    columns: Tensor,  # [4, A] int32: slot, number of tokens, how many of them are computed, start in `prompts`
    prompts: Tensor,  # int32, concatenated
    max_tokens: int,  # of the longest prompt
    tokens: Tensor,  # [num_slots, max_len] int32
    lens: Tensor,  # [num_slots] int64
    computed: Tensor,  # [num_slots] int64
    is_finished: Tensor,  # [num_slots] bool
) -> None:
    """Writes the tokens and lengths of sequences that enter slots."""
    num_entries = columns.shape[1]
    _enter_slot[(num_entries, triton.cdiv(max_tokens, _WRITES))](
        columns,
        prompts,
        tokens,
        lens,
        computed,
        is_finished,
        num_entries,
        tokens.stride(0),
        BLOCK=_WRITES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_entries"])
def _enter_slot(columns, prompts, tokens, lens, computed, is_finished, num_entries, token_stride, BLOCK: tl.constexpr):
    number, chunk = tl.program_id(0), tl.program_id(1)
    slot = tl.load(columns + number).to(tl.int64)
    length = tl.load(columns + num_entries + number)
    start = tl.load(columns + 3 * num_entries + number)
    item = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = item < length
    tl.store(tokens + slot * token_stride + item, tl.load(prompts + start + item, mask=inside, other=0), mask=inside)
    if chunk == 0:
        tl.store(lens + slot, length.to(tl.int64))
        tl.store(computed + slot, tl.load(columns + 2 * num_entries + number).to(tl.int64))
        tl.store(is_finished + slot, False)


def append_tokens(
    slots: Tensor,  # [B] int32, the slot of each row
    sampled: Tensor,  # [B] int64
    flags: Tensor,  # [B] uint8, from sampling: steps.BROKEN or 0
    tokens: Tensor,  # [num_slots, max_len] int32
    lens: Tensor,  # [num_slots] int64
    is_finished: Tensor,  # [num_slots] bool
    end_len: Tensor,  # [num_slots] int64
    stop_token_ids: Tensor,  # [num_slots, width] int64
    out: Tensor,  # [2, B] int32: the token, and one of steps.UNFINISHED, STOPPED, FULL, BROKEN
    *,
    advances: Tensor | None,  # [num_slots] int64, `computed`, in a decode step
    turn: Tensor | None = None,  # [1] int32, counts up: `out` is places for results, used in turn
) -> None:
    """Appends the sampled tokens to their slots. A slot whose sequence ends, or has ended, does not advance.

    With a `turn`, `out` is [RING_PLACES, 2 * W + 1] int32 in pinned memory, for at most W rows: a graph then needs no
    copy to the host after it, which takes 16 us on an H200. A place ends with the turn in which it was filled."""
    batch_size = slots.shape[0]
    assert turn is None or batch_size <= _BLOCK
    _append[(triton.cdiv(batch_size, _BLOCK),)](
        slots,
        sampled,
        flags,
        tokens,
        lens,
        is_finished,
        end_len,
        stop_token_ids,
        out,
        out if turn is None else turn,
        lens if advances is None else advances,
        batch_size,
        tokens.stride(0),
        out.stride(0) if turn is None else out.shape[1] // 2,
        MAX_LEN=tokens.shape[1],
        NUM_STOPS=stop_token_ids.shape[1],
        ADVANCES=advances is not None,
        RING_PLACES=0 if turn is None else RING_PLACES,
        BLOCK=_BLOCK,
        num_warps=2,
        **dependent_launch(slots.device),
    )


@triton.jit(do_not_specialize=["batch_size", "out_stride"])
def _append(
    slots,
    sampled,
    flags,
    tokens,
    lens,
    is_finished,
    end_len,
    stop_token_ids,
    out,
    turns,
    computed,
    batch_size,
    token_stride,
    out_stride,
    MAX_LEN: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    ADVANCES: tl.constexpr,
    RING_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = item < batch_size
    slot = tl.load(slots + item, mask=inside, other=0).to(tl.int64)
    was_finished = tl.load(is_finished + slot, mask=inside, other=1) != 0
    token = tl.load(sampled + item, mask=inside, other=0)
    length = tl.load(lens + slot, mask=inside, other=0)
    stops = tl.load(
        stop_token_ids + slot[:, None] * NUM_STOPS + tl.arange(0, NUM_STOPS)[None, :], mask=inside[:, None], other=-1
    )
    is_stop = tl.sum((stops == token[:, None]).to(tl.int32), axis=1) > 0
    is_full = length + 1 >= tl.load(end_len + slot, mask=inside, other=0)
    finished = tl.where(is_stop, 1, tl.where(is_full, 2, 0))
    flag = tl.load(flags + item, mask=inside, other=0).to(tl.int32)
    finished = tl.where(flag != 0, flag, finished)
    is_active = inside & (was_finished == 0)
    tl.store(tokens + slot * token_stride + length, token.to(tl.int32), mask=is_active & (length < MAX_LEN))
    tl.store(lens + slot, length + 1, mask=is_active)
    tl.store(is_finished + slot, (finished != 0), mask=is_active)
    if ADVANCES:
        at = tl.load(computed + slot, mask=inside, other=0)
        tl.store(computed + slot, at + 1, mask=is_active)
    if RING_PLACES:
        turn = tl.atomic_add(turns, 1)
        out += (turn & (RING_PLACES - 1)) * (2 * out_stride + 1)
        tl.store(out + 2 * out_stride, turn)
    tl.store(out + item, token.to(tl.int32), mask=inside)
    tl.store(out + out_stride + item, finished, mask=inside)


def accept_drafts(
    slots: Tensor,  # [R] int32, the slot of each row
    num_rows: Tensor,  # [R] int32, in a slot's first row how many it has, one more than its drafts; 0 in the others
    sampled: Tensor,  # [R] int64, the token that each row sampled
    flags: Tensor,  # [R] uint8, from sampling: steps.BROKEN or 0
    tokens: Tensor,  # [num_slots, max_len] int32, with the drafts behind the known tokens
    lens: Tensor,  # [num_slots] int64
    computed: Tensor,  # [num_slots] int64
    is_finished: Tensor,  # [num_slots] bool
    end_len: Tensor,  # [num_slots] int64
    stop_token_ids: Tensor,  # [num_slots, width] int64
    out: Tensor,  # [3, R] int32: sampled tokens; in first rows the slot's state (`append_tokens`), and how many it gets
) -> None:
    """Gives each slot the drafts that equal what was sampled before them, and one more token."""
    batch_size = sampled.shape[0]
    _accept[(batch_size,)](
        slots,
        num_rows,
        sampled,
        flags,
        tokens,
        lens,
        computed,
        is_finished,
        end_len,
        stop_token_ids,
        out,
        batch_size,
        tokens.stride(0),
        NUM_STOPS=stop_token_ids.shape[1],
        num_warps=1,
    )


@triton.jit(do_not_specialize=["batch_size"])
def _accept(
    slots,
    num_rows,
    sampled,
    flags,
    tokens,
    lens,
    computed,
    is_finished,
    end_len,
    stop_token_ids,
    out,
    batch_size,
    token_stride,
    NUM_STOPS: tl.constexpr,
):
    row = tl.program_id(0)
    tl.store(out + row, tl.load(sampled + row).to(tl.int32))
    count = tl.load(num_rows + row)
    if count == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    length, end = tl.load(lens + slot), tl.load(end_len + slot)
    stops = tl.load(stop_token_ids + slot * NUM_STOPS + tl.arange(0, NUM_STOPS))
    places = tokens + slot * token_stride + length
    taken = 0
    state = 0
    follows = True
    while follows:
        token = tl.load(sampled + row + taken)
        draft = tl.load(places + taken, mask=taken + 1 < count, other=-1)
        is_stop = tl.sum((stops == token).to(tl.int32), axis=0) > 0
        state = tl.where(is_stop, 1, tl.where(length + taken + 1 >= end, 2, 0))
        flag = tl.load(flags + row + taken).to(tl.int32)
        state = tl.where(flag != 0, flag, state)
        tl.store(places + taken, token.to(tl.int32))
        taken += 1
        follows = (state == 0) & (draft == token)
    tl.store(lens + slot, length + taken)
    tl.store(computed + slot, tl.load(computed + slot) + taken)
    tl.store(is_finished + slot, state != 0)
    tl.store(out + batch_size + row, state)
    tl.store(out + 2 * batch_size + row, taken)
