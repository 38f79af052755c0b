"""The slots' state on a CPU: what a step reads from it, and what its sampled tokens change in it."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.cpu.launch import arguments_at, kernel
from headrace.kernels.cpu.native import Pointer, int32s, int64s, uint8s
from headrace.kernels.layout import Appended, StepRows
from headrace.steps import FULL, STOPPED, UNFINISHED


def lay_out_rows(
    slots: Tensor, num_tokens: Tensor, starts: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int
) -> StepRows:
    """See `ops.lay_out_rows`."""
    num_seqs, num_rows = len(slots), int(num_tokens.sum())
    rows = StepRows(
        token_ids=torch.empty(num_rows, dtype=torch.int32),
        positions=torch.empty(num_rows, dtype=torch.int64),
        slot_mapping=torch.empty(num_rows, dtype=torch.int64),
        query_starts=torch.empty(num_seqs + 1, dtype=torch.int32),
        context_lens=torch.empty(num_seqs, dtype=torch.int32),
    )
    strides = tokens.stride(0), block_tables.stride(0)
    _lay_out_rows.run_briefly(slots, num_tokens, starts, tokens, block_tables, *rows, *strides, block_size, num_seqs)
    return rows


@kernel(
    slots="pointer",
    num_tokens="pointer",
    starts="pointer",
    tokens="pointer",
    block_tables="pointer",
    token_ids="pointer",
    positions="pointer",
    slot_mapping="pointer",
    query_starts="pointer",
    context_lens="pointer",
    token_stride="integer",
    table_stride="integer",
    block_size="integer",
    num_seqs="integer",
)
def _lay_out_rows(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    query_starts, row = int32s(a.query_starts), 0
    query_starts[0] = 0
    for i in range(a.num_seqs):
        slot, start, end = int64s(a.slots)[i], int64s(a.starts)[i], int64s(a.starts)[i] + int64s(a.num_tokens)[i]
        for position in range(start, end):
            block = int32s(a.block_tables)[slot * a.table_stride + position // a.block_size]
            int32s(a.token_ids)[row] = int32s(a.tokens)[slot * a.token_stride + position]
            int64s(a.positions)[row] = position
            int64s(a.slot_mapping)[row] = block * a.block_size + position % a.block_size
            row += 1
        query_starts[i + 1] = row
        int32s(a.context_lens)[i] = end


def append_tokens(
    slots: Tensor,
    num_rows: Tensor,
    sampled: Tensor,
    flags: Tensor,
    tokens: Tensor,
    lens: Tensor,
    is_finished: Tensor,
    end_len: Tensor,
    stop_token_ids: Tensor,
) -> Appended:
    """See `ops.append_tokens`."""
    appended = Appended(torch.empty(len(slots), dtype=torch.int64), torch.empty(len(slots), dtype=torch.uint8))
    inputs = slots, num_rows, sampled, flags
    columns = tokens, lens, is_finished, end_len, stop_token_ids
    _append_tokens.run_briefly(*inputs, *columns, *appended, *tokens.shape, stop_token_ids.shape[1], len(slots))
    return appended


@kernel(
    slots="pointer",
    num_rows="pointer",
    sampled="pointer",
    flags="pointer",
    tokens="pointer",
    lens="pointer",
    is_finished="pointer",
    end_len="pointer",
    stop_token_ids="pointer",
    nums="pointer",
    states="pointer",
    num_slots="integer",
    max_len="integer",
    num_stops="integer",
    num_seqs="integer",
)
def _append_tokens(pointer: Pointer) -> None:
    a = arguments_at(pointer)
    sampled, tokens, stops = int64s(a.sampled), int32s(a.tokens), int64s(a.stop_token_ids)
    next_row = 0
    for i in range(a.num_seqs):
        slot, row, state, follows = int64s(a.slots)[i], next_row, UNFINISHED, True
        length = int64s(a.lens)[slot]
        next_row += int64s(a.num_rows)[i]
        while row < next_row and follows:
            token, place = sampled[row], slot * a.max_len + length
            state = FULL if length + 1 >= int64s(a.end_len)[slot] else UNFINISHED
            for j in range(a.num_stops):
                if stops[slot * a.num_stops + j] == token:
                    state = STOPPED
            if uint8s(a.flags)[row] != 0:
                state = uint8s(a.flags)[row]
            follows = False
            if length < a.max_len:
                follows = state == UNFINISHED and tokens[place] == token  # the next row's input is what was sampled
                tokens[place] = token
            length, row = length + 1, row + 1
        int64s(a.nums)[i] = length - int64s(a.lens)[slot]
        uint8s(a.states)[i] = state
        int64s(a.lens)[slot] = length
        uint8s(a.is_finished)[slot] = state != UNFINISHED
