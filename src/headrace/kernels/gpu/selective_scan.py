"""The state space of Mamba 2: one kernel for tokens that decode, one that computes prompts in chunks.

A program owns the state of some dimensions of one head, from the first token of its sequence to the last one. Within a
chunk, what tokens write and later ones read is a few small GEMMs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.layout import StepLayout

_MIN_DOT = 16  # smallest size of an operand of `tl.dot`
_WIDE_STATE = 128  # with larger states a program has shorter chunks and fewer dimensions, for its shared memory


def selective_scan(
    x: Tensor,  # [T, H, P], heads contiguous
    b: Tensor,  # [T, G, N], groups contiguous
    c: Tensor,  # [T, G, N], groups contiguous
    dt: Tensor,  # [T, H], heads contiguous
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, P, N] float32
    *,
    rate: Tensor,  # [H] float32
    skip: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, P]
    _, num_heads, head_dim = x.shape
    num_groups, state_size = b.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_decodes = layout.num_seqs if layout.max_query_len == 1 else layout.num_decodes
    num_prefills = layout.num_seqs - num_decodes
    arguments = (x, b, c, dt, state, rate, skip, dt_bias, out, layout.query_starts, layout.context_lens, layout.slots)
    strides = (x.stride(0), b.stride(0), c.stride(0), dt.stride(0), out.stride(0))
    sizes = (num_heads, head_dim, state_size)
    per_group = num_heads // num_groups
    block_n = max(_MIN_DOT, triton.next_power_of_2(state_size))
    if num_decodes:
        block_p = min(32, triton.next_power_of_2(head_dim))
        _decode_scan[(num_decodes, num_heads, triton.cdiv(head_dim, block_p))](
            *arguments, *strides, *sizes, PER_GROUP=per_group, BLOCK_P=block_p, BLOCK_N=block_n
        )
    if num_prefills:
        is_wide = block_n > _WIDE_STATE
        block_p = max(_MIN_DOT, min(32 if is_wide else 64, triton.next_power_of_2(head_dim)))
        _chunk_scan[(num_prefills, num_heads, triton.cdiv(head_dim, block_p))](
            *arguments,
            *strides,
            *sizes,
            num_decodes,
            PER_GROUP=per_group,
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            CHUNK=32 if is_wide else 64,
            num_warps=4,
            num_stages=1,
        )
    return out


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact also where exp(x) is small beside 1."""
    small = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + small
    exact = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _decode_scan(
    x,
    b,
    c,
    dt,
    state,
    rate,
    skip,
    dt_bias,
    out,
    starts,
    context_lens,
    slots,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    out_stride,
    num_heads,
    head_dim,
    state_size,
    PER_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + seq).to(tl.int64)
    if token == tl.load(starts + seq + 1):
        return
    dims = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_N)
    is_dim, is_column = dims < head_dim, columns < state_size
    inside = is_dim[:, None] & is_column[None, :]
    context_len = tl.load(context_lens + seq)
    slot = tl.load(slots + seq).to(tl.int64)
    places = ((slot * num_heads + head) * head_dim + dims)[:, None] * state_size + columns[None, :]
    step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    own = tl.load(x + token * x_stride + head * head_dim + dims, mask=is_dim, other=0.0).to(tl.float32)
    group = (head // PER_GROUP) * state_size
    written = tl.load(b + token * b_stride + group + columns, mask=is_column, other=0.0).to(tl.float32)
    read = tl.load(c + token * c_stride + group + columns, mask=is_column, other=0.0).to(tl.float32)
    # The first token of a sequence reads zeros. Padding, with a context length of 0, writes no state.
    matrix = tl.load(state + places, mask=inside & (context_len > 1), other=0.0)
    matrix = matrix * tl.exp(step * tl.load(rate + head)) + (step * own)[:, None] * written[None, :]
    tl.store(state + places, matrix, mask=inside & (context_len > 0))
    result = tl.sum(matrix * read[None, :], 1) + tl.load(skip + head) * own
    tl.store(out + token * out_stride + head * head_dim + dims, result.to(out.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["first_seq"])
def _chunk_scan(
    x,
    b,
    c,
    dt,
    state,
    rate,
    skip,
    dt_bias,
    out,
    starts,
    context_lens,
    slots,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    out_stride,
    num_heads,
    head_dim,
    state_size,
    first_seq,
    PER_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    seq, head = first_seq + tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    num_tokens = end - begin
    if num_tokens == 0:
        return
    dims = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns, indexes = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    is_dim, is_column = dims < head_dim, columns < state_size
    inside = is_dim[:, None] & is_column[None, :]
    has_state = tl.load(context_lens + seq) > num_tokens
    slot = tl.load(slots + seq).to(tl.int64)
    places = ((slot * num_heads + head) * head_dim + dims)[:, None] * state_size + columns[None, :]
    own_rate, own_bias, own_skip = tl.load(rate + head), tl.load(dt_bias + head), tl.load(skip + head)
    group = (head // PER_GROUP) * state_size
    matrix = tl.load(state + places, mask=inside & has_state, other=0.0)  # [P, N]
    for first in range(0, num_tokens, CHUNK):
        is_token = first + indexes < num_tokens
        tokens = (begin + first + indexes).to(tl.int64)
        steps = softplus(tl.load(dt + tokens * dt_stride + head, mask=is_token, other=0.0).to(tl.float32) + own_bias)
        steps = tl.where(is_token, steps, 0.0)
        sums = tl.cumsum(steps * own_rate, 0)  # log of the factor since the start of the chunk
        total = tl.sum(steps * own_rate, 0)
        of_group = group + columns[None, :]
        is_read = is_token[:, None] & is_column[None, :]
        keys = tl.load(b + tokens[:, None] * b_stride + of_group, mask=is_read, other=0.0).to(tl.float32)
        queries = tl.load(c + tokens[:, None] * c_stride + of_group, mask=is_read, other=0.0).to(tl.float32)
        is_own = is_token[:, None] & is_dim[None, :]
        of_head = head * head_dim + dims[None, :]
        values = tl.load(x + tokens[:, None] * x_stride + of_head, mask=is_own, other=0.0).to(tl.float32)
        is_earlier = indexes[:, None] >= indexes[None, :]
        between = tl.exp(tl.where(is_earlier, sums[:, None] - sums[None, :], 0.0))
        scores = tl.where(is_earlier, tl.dot(queries, tl.trans(keys)) * between * steps[None, :], 0.0)
        result = tl.dot(scores, values) + tl.exp(sums)[:, None] * tl.dot(queries, tl.trans(matrix))
        result += own_skip * values
        tl.store(out + tokens[:, None] * out_stride + of_head, result.to(out.dtype.element_ty), mask=is_own)
        left = values * (steps * tl.exp(total - sums))[:, None]
        matrix = matrix * tl.exp(total) + tl.dot(tl.trans(left), keys)
    tl.store(state + places, matrix, mask=inside)
