"""Causal convolution of each channel over the last tokens of its sequence, with a state of these tokens per slot.

A decode step is one kernel. A step with prompts is two: all outputs are computed before any state is replaced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.layout import StepLayout

_BLOCK_C = 256  # channels of a program; not tuned yet
_BLOCK_T = 8  # tokens of a program


def causal_conv(
    x: Tensor,  # [T, C], channels contiguous
    layout: StepLayout,
    state: Tensor,  # [num_slots, K - 1, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,  # [C]
    *,
    activates: bool,
) -> Tensor:  # [T, C]
    num_tokens, num_channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_blocks = triton.cdiv(num_channels, _BLOCK_C)
    starts, context_lens, slots = layout.query_starts, layout.context_lens, layout.slots
    some_bias = weight if bias is None else bias
    if layout.max_query_len == 1:
        _decode_conv[(layout.num_seqs, num_blocks)](
            x,
            state,
            weight,
            some_bias,
            out,
            starts,
            context_lens,
            slots,
            x.stride(0),
            num_channels,
            HAS_BIAS=bias is not None,
            ACTIVATES=activates,
            K=weight.shape[1],
            BLOCK_C=_BLOCK_C,
        )
        return out
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    seqs = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
    _prefill_conv[(triton.cdiv(num_tokens, _BLOCK_T), num_blocks)](
        x,
        state,
        weight,
        some_bias,
        out,
        seqs,
        starts,
        context_lens,
        slots,
        num_tokens,
        x.stride(0),
        num_channels,
        HAS_BIAS=bias is not None,
        ACTIVATES=activates,
        K=weight.shape[1],
        BLOCK_T=_BLOCK_T,
        BLOCK_C=_BLOCK_C,
    )
    _conv_state[(layout.num_seqs, num_blocks)](
        x,
        state,
        starts,
        context_lens,
        slots,
        x.stride(0),
        num_channels,
        K=weight.shape[1],
        BLOCK_C=_BLOCK_C,
    )
    return out


@triton.jit
def _decode_conv(
    x,
    state,
    weight,
    bias,
    out,
    starts,
    context_lens,
    slots,
    x_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    seq = tl.program_id(0)
    token = tl.load(starts + seq).to(tl.int64)
    if token == tl.load(starts + seq + 1):
        return
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < num_channels
    context_len = tl.load(context_lens + seq)
    rows = state + tl.load(slots + seq).to(tl.int64) * (K - 1) * num_channels + channels
    newest = tl.load(x + token * x_stride + channels, mask=inside, other=0.0)
    mixed = newest.to(tl.float32) * tl.load(weight + channels * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K - 1):
        # The first token of a sequence reads zeros. Padding, with a context length of 0, writes no state.
        older = tl.load(rows + k * num_channels, mask=inside & (context_len > 1), other=0.0)
        mixed += older.to(tl.float32) * tl.load(weight + channels * K + k, mask=inside, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(rows + (k - 1) * num_channels, older, mask=inside & (context_len > 0))
    tl.store(rows + (K - 2) * num_channels, newest, mask=inside & (context_len > 0))
    if HAS_BIAS:
        mixed += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATES:
        mixed = mixed * tl.sigmoid(mixed)
    tl.store(out + token * num_channels + channels, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _prefill_conv(
    x,
    state,
    weight,
    bias,
    out,
    seqs,
    starts,
    context_lens,
    slots,
    num_tokens,
    x_stride,
    num_channels,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, is_channel = tokens < num_tokens, channels < num_channels
    inside = is_token[:, None] & is_channel[None, :]
    seq = tl.load(seqs + tokens, mask=is_token, other=0)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    has_state = tl.load(context_lens + seq) > end - begin
    rows = tl.load(slots + seq).to(tl.int64) * (K - 1)
    index = tokens - begin  # among the sequence's tokens of this step
    mixed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for k in tl.static_range(K):
        source = index - (K - 1 - k)
        places = (begin + source).to(tl.int64)[:, None] * x_stride + channels[None, :]
        own = tl.load(x + places, mask=inside & (source >= 0)[:, None], other=0.0).to(tl.float32)
        kept = (rows + K - 1 + source)[:, None] * num_channels + channels[None, :]
        is_kept = (source < 0) & has_state
        earlier = tl.load(state + kept, mask=inside & is_kept[:, None], other=0.0).to(tl.float32)
        factor = tl.load(weight + channels * K + k, mask=is_channel, other=0.0).to(tl.float32)
        mixed += (own + earlier) * factor[None, :]
    if HAS_BIAS:
        mixed += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if ACTIVATES:
        mixed = mixed * tl.sigmoid(mixed)
    places = tokens.to(tl.int64)[:, None] * num_channels + channels[None, :]
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _conv_state(
    x,
    state,
    starts,
    context_lens,
    slots,
    x_stride,
    num_channels,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    seq = tl.program_id(0)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    num_tokens = end - begin
    if num_tokens == 0:
        return
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < num_channels
    has_state = tl.load(context_lens + seq) > num_tokens
    rows = state + tl.load(slots + seq).to(tl.int64) * (K - 1) * num_channels + channels
    for k in tl.static_range(K - 1):
        source = num_tokens + k  # among the old state and the step's tokens, one after the other
        is_kept = source < K - 1
        # A row is read before it is replaced: it moves to an earlier one.
        older = tl.load(rows + source * num_channels, mask=inside & is_kept & has_state, other=0.0)
        token = (begin + source - (K - 1)).to(tl.int64)
        newer = tl.load(x + token * x_stride + channels, mask=inside & (source >= K - 1), other=0.0)
        tl.store(rows + k * num_channels, tl.where(is_kept, older, newer), mask=inside)
