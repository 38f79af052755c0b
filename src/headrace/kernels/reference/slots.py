"""What a step on a CPU reads from the slots, and what its sampled tokens change in them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.layout import Appended, StepRows
from headrace.steps import FULL, STOPPED, UNFINISHED


def lay_out_rows(
    slots: Tensor, num_tokens: Tensor, starts: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int
) -> StepRows:
    """See `ops.lay_out_rows`."""
    query_starts = torch.zeros(len(slots) + 1, dtype=torch.int32)
    query_starts[1:] = num_tokens.cumsum(0)
    row_slots = torch.repeat_interleave(slots, num_tokens)
    offsets = torch.arange(len(row_slots)) - torch.repeat_interleave(query_starts[:-1], num_tokens)
    positions = torch.repeat_interleave(starts, num_tokens) + offsets
    blocks = block_tables[row_slots, positions // block_size].long()
    return StepRows(
        token_ids=tokens[row_slots, positions],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_starts=query_starts,
        context_lens=(starts + num_tokens).int(),
    )


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
    first_rows = num_rows.cumsum(0) - num_rows
    row_slots = torch.repeat_interleave(slots, num_rows)
    offsets = torch.arange(len(row_slots)) - torch.repeat_interleave(first_rows, num_rows)
    places = lens[row_slots] + offsets
    states = torch.where(places + 1 >= end_len[row_slots], FULL, UNFINISHED)
    states[(stop_token_ids[row_slots] == sampled[:, None]).any(1)] = STOPPED
    states = torch.where(flags != 0, flags.long(), states)
    # A row's input follows if it is what the row before has sampled, and that has not ended the sequence.
    follows = offsets == 0
    later = (~follows).nonzero().flatten()
    follows[later] = (tokens[row_slots[later], places[later] - 1] == sampled[later - 1]) & (states[later - 1] == 0)
    num_breaks = (~follows).cumsum(0)
    is_kept = num_breaks == torch.repeat_interleave(num_breaks[first_rows], num_rows)
    num_tokens = torch.zeros_like(num_rows).index_add_(
        0, torch.repeat_interleave(torch.arange(len(slots)), num_rows), is_kept.long()
    )
    last_rows = first_rows + num_tokens - 1
    has_place = places[last_rows] < tokens.shape[1]
    tokens[slots[has_place], places[last_rows][has_place]] = sampled[last_rows][has_place].int()
    lens[slots] += num_tokens
    is_finished[slots] = states[last_rows] != 0
    return Appended(num_tokens, states[last_rows].to(torch.uint8))
