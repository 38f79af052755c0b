"""Copies contexts from their cache blocks into contiguous keys and values, in the type of the kernel that reads
them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.e3m4 import key_in, scale_of_head
from headrace.kernels.layout import Gathering, LayerCache, StepLayout

_TOKENS = 32  # per program: the best of 32, 64 and 128 on an H200, 2026-11-15


def gather_contexts(
    cache: LayerCache, layout: StepLayout, gathering: Gathering, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values of a gathering's contexts, [Hkv, num_tokens, D] each."""
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    num_seqs = gathering.starts.shape[0] - 1
    shape = (num_kv_heads, gathering.num_tokens, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=cache.keys.device) for _ in range(2))
    _gather_context[(num_kv_heads, triton.cdiv(gathering.longest, _TOKENS), num_seqs)](
        cache.keys,
        cache.values,
        cache.keys if cache.key_units is None else cache.key_units,
        layout.block_tables,
        layout.slots[gathering.first_seq :],
        gathering.starts,
        keys,
        values,
        layout.block_tables.stride(0),
        gathering.num_tokens,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        TOKENS=_TOKENS,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=4,
    )
    return keys, values


@triton.jit(do_not_specialize=["table_stride", "num_tokens"], do_not_specialize_on_alignment=["slots", "starts"])
def _gather_context(
    keys,
    values,
    key_units,
    block_tables,
    slots,
    starts,
    gathered_keys,
    gathered_values,
    table_stride,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    head, tile, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + seq)
    context_len = tl.load(starts + seq + 1) - start
    if tile * TOKENS >= context_len:
        return
    position = tile * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, DIM_BLOCK)
    table = block_tables + tl.load(slots + seq).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=position < context_len, other=0).to(tl.int64)
    inside = (position[:, None] < context_len) & (dims[None, :] < HEAD_DIM)
    line = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    source = line[:, None] + dims[None, :]
    target = (head.to(tl.int64) * num_tokens + start + position)[:, None] * HEAD_DIM + dims[None, :]
    key = tl.load(keys + source, mask=inside, other=0.0)
    value = tl.load(values + source, mask=inside, other=0.0)
    if keys.dtype.element_ty == tl.uint8:
        key = key_in(tl.float32, key, IS_INTERPRETED) * scale_of_head(1.0, keys, key_units, head)
    tl.store(gathered_keys + target, key.to(gathered_keys.dtype.element_ty), mask=inside)
    tl.store(gathered_values + target, value.to(gathered_values.dtype.element_ty), mask=inside)
