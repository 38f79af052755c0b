"""The slots on a CPU: what a step reads from them, and what it appends to them. A GPU has kernels of its own."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from headrace.kernels.layout import Appended, StepRows
from headrace.kernels.ops.dispatch import kernels_for


def lay_out_rows(
    slots: Tensor,  # [S] int64
    num_tokens: Tensor,  # [S] int64, to compute of each slot
    starts: Tensor,  # [S] int64, the position of the first of them
    tokens: Tensor,  # [num_slots, max_len] int32
    block_tables: Tensor,  # [num_slots, max_blocks] int32
    block_size: int,
) -> StepRows:
    """Finds the tokens of a step, slot after slot, and where their keys and values go."""
    rows: StepRows = _kernels(slots).lay_out_rows(slots, num_tokens, starts, tokens, block_tables, block_size)
    return rows


def append_tokens(
    slots: Tensor,  # [S] int64
    num_rows: Tensor,  # [S] int64, of each slot: one more than its drafts
    sampled: Tensor,  # [R] int64, the token that each row sampled
    flags: Tensor,  # [R] uint8, from sampling: steps.BROKEN or 0
    tokens: Tensor,  # [num_slots, max_len] int32, with the drafts behind the known tokens
    lens: Tensor,  # [num_slots] int64
    is_finished: Tensor,  # [num_slots] bool
    end_len: Tensor,  # [num_slots] int64, the length at which the sequence ends
    stop_token_ids: Tensor,  # [num_slots, width] int64
) -> Appended:
    """Gives each slot the drafts that equal what was sampled before them, and one more token: what its sequence would
    have got one at a time, see `runner/verification.py`. A token that ends the sequence is its last."""
    appended: Appended = _kernels(slots).append_tokens(
        slots, num_rows, sampled, flags, tokens, lens, is_finished, end_len, stop_token_ids
    )
    return appended


def _kernels(slots: Tensor) -> ModuleType:
    return kernels_for(slots.device, torch.float32)
