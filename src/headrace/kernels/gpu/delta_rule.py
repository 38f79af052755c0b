"""The gated delta rule: one kernel for tokens that decode, one that computes prompts in chunks.

A program owns some columns of the state of one head, from the first token of its sequence to the last one. Within a
chunk, the change that each token makes depends on those before it: a triangular system, whose inverse is a product of
few factors. With S strictly lower triangular of size 16, S^16 = 0, so (I + S)^-1 = (I - S)(I + S^2)(I + S^4)(I + S^8).
Chunks are so short because the powers grow where keys repeat, up to 3,432 for 16 tokens, and lose as many digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.selective_scan import softplus
from headrace.kernels.layout import StepLayout
from headrace.kernels.reference.recurrent import L2_EPS

_DECODE_BLOCK_V = 16  # columns of a program with one warp; not tuned yet
_PREFILL_BLOCK_V = 32
_CHUNK = 16  # tokens; the factors of the inverse are written for this size


def gated_delta_rule(
    q: Tensor,  # [T, Hk, K], heads contiguous
    k: Tensor,  # [T, Hk, K], heads contiguous
    v: Tensor,  # [T, H, V], heads contiguous
    a: Tensor,  # [T, H], heads contiguous
    b: Tensor,  # [T, H], heads contiguous
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, K, V] float32
    *,
    rate: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, V]
    (_, num_key_heads, key_dim), (_, num_heads, value_dim) = q.shape, v.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    num_decodes = layout.num_seqs if layout.max_query_len == 1 else layout.num_decodes
    num_prefills = layout.num_seqs - num_decodes
    tensors = (q, k, v, a, b, state, rate, dt_bias, out, layout.query_starts, layout.context_lens, layout.slots)
    strides = (q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), out.stride(0))
    sizes = (num_heads, key_dim, value_dim, key_dim**-0.5)
    per_key_head, width = num_heads // num_key_heads, triton.next_power_of_2(value_dim)
    block_k = max(16, triton.next_power_of_2(key_dim))
    if num_decodes:
        block_v = min(_DECODE_BLOCK_V, width)
        _decode_delta[(num_decodes, num_heads, triton.cdiv(value_dim, block_v))](
            *tensors,
            *strides,
            *sizes,
            PER_KEY_HEAD=per_key_head,
            EPS=L2_EPS,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=1,
        )
    if num_prefills:
        block_v = max(16, min(_PREFILL_BLOCK_V, width))
        _chunk_delta[(num_prefills, num_heads, triton.cdiv(value_dim, block_v))](
            *tensors,
            *strides,
            *sizes,
            num_decodes,
            PER_KEY_HEAD=per_key_head,
            EPS=L2_EPS,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            CHUNK=_CHUNK,
            num_warps=4,
            num_stages=1,
        )
    return out


@triton.jit
def _decode_delta(
    q,
    k,
    v,
    a,
    b,
    state,
    rate,
    dt_bias,
    out,
    starts,
    context_lens,
    slots,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    out_stride,
    num_heads,
    key_dim,
    value_dim,
    scale,
    PER_KEY_HEAD: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + seq).to(tl.int64)
    if token == tl.load(starts + seq + 1):
        return
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = rows < key_dim, columns < value_dim
    inside = is_row[:, None] & is_column[None, :]
    context_len = tl.load(context_lens + seq)
    slot = tl.load(slots + seq).to(tl.int64)
    places = ((slot * num_heads + head) * key_dim + rows)[:, None] * value_dim + columns[None, :]
    of_key_head = (head // PER_KEY_HEAD) * key_dim + rows
    of_head = head * value_dim + columns
    key = tl.load(k + token * k_stride + of_key_head, mask=is_row, other=0.0).to(tl.float32)
    query = tl.load(q + token * q_stride + of_key_head, mask=is_row, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + of_head, mask=is_column, other=0.0).to(tl.float32)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale)
    step = softplus(tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    strength = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    # The first token of a sequence reads zeros. Padding, with a context length of 0, writes no state.
    matrix = tl.load(state + places, mask=inside & (context_len > 1), other=0.0)
    matrix = matrix * tl.exp(tl.load(rate + head) * step)
    held = tl.sum(matrix * key[:, None], 0)  # what the key held so far
    matrix += key[:, None] * (strength * (value - held))[None, :]
    tl.store(state + places, matrix, mask=inside & (context_len > 0))
    result = tl.sum(matrix * query[:, None], 0)
    tl.store(out + token * out_stride + of_head, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["first_seq"])
def _chunk_delta(
    q,
    k,
    v,
    a,
    b,
    state,
    rate,
    dt_bias,
    out,
    starts,
    context_lens,
    slots,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    out_stride,
    num_heads,
    key_dim,
    value_dim,
    scale,
    first_seq,
    PER_KEY_HEAD: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    seq, head = first_seq + tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    num_tokens = end - begin
    if num_tokens == 0:
        return
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    indexes = tl.arange(0, CHUNK)
    is_row, is_column = rows < key_dim, columns < value_dim
    inside = is_row[:, None] & is_column[None, :]
    slot = tl.load(slots + seq).to(tl.int64)
    places = ((slot * num_heads + head) * key_dim + rows)[:, None] * value_dim + columns[None, :]
    own_rate, own_bias = tl.load(rate + head), tl.load(dt_bias + head)
    of_key_head = ((head // PER_KEY_HEAD) * key_dim + rows)[None, :]
    of_head = (head * value_dim + columns)[None, :]
    is_earlier, is_before = indexes[:, None] >= indexes[None, :], indexes[:, None] > indexes[None, :]
    unit = tl.where(indexes[:, None] == indexes[None, :], 1.0, 0.0)
    matrix = tl.load(state + places, mask=inside & (tl.load(context_lens + seq) > num_tokens), other=0.0)
    for first in range(0, num_tokens, CHUNK):
        is_token = first + indexes < num_tokens
        tokens = (begin + first + indexes).to(tl.int64)
        is_key, is_value = is_token[:, None] & is_row[None, :], is_token[:, None] & is_column[None, :]
        keys = tl.load(k + tokens[:, None] * k_stride + of_key_head, mask=is_key, other=0.0).to(tl.float32)
        queries = tl.load(q + tokens[:, None] * q_stride + of_key_head, mask=is_key, other=0.0).to(tl.float32)
        values = tl.load(v + tokens[:, None] * v_stride + of_head, mask=is_value, other=0.0).to(tl.float32)
        keys = keys * tl.rsqrt(tl.sum(keys * keys, 1) + EPS)[:, None]
        queries = queries * (tl.rsqrt(tl.sum(queries * queries, 1) + EPS) * scale)[:, None]
        steps = softplus(tl.load(a + tokens * a_stride + head, mask=is_token, other=0.0).to(tl.float32) + own_bias)
        steps = tl.where(is_token, steps * own_rate, 0.0)
        strength = tl.sigmoid(tl.load(b + tokens * b_stride + head, mask=is_token, other=0.0).to(tl.float32))
        strength = tl.where(is_token, strength, 0.0)[:, None]
        sums, total = tl.cumsum(steps, 0), tl.sum(steps, 0)  # logs of factors
        since = tl.exp(sums)[:, None]
        between = tl.exp(tl.where(is_earlier, sums[:, None] - sums[None, :], 0.0))
        lower = tl.where(is_before, strength * tl.dot(keys, tl.trans(keys)) * between, 0.0)
        # The powers need all digits: they grow and cancel where keys repeat.
        second = tl.dot(lower, lower, input_precision="ieee")
        fourth = tl.dot(second, second, input_precision="ieee")
        eighth = tl.dot(fourth, fourth, input_precision="ieee")
        inverse = tl.dot(unit - lower, unit + second, input_precision="ieee")
        inverse = tl.dot(inverse, unit + fourth, input_precision="ieee")
        inverse = tl.dot(inverse, unit + eighth, input_precision="ieee")
        held = since * tl.dot(keys, matrix)
        change = tl.dot(inverse, strength * (values - held))
        scores = tl.where(is_earlier, tl.dot(queries, tl.trans(keys)) * between, 0.0)
        result = since * tl.dot(queries, matrix) + tl.dot(scores, change)
        tl.store(out + tokens[:, None] * out_stride + of_head, result.to(out.dtype.element_ty), mask=is_value)
        left = keys * tl.exp(total - sums)[:, None]
        matrix = matrix * tl.exp(total) + tl.dot(tl.trans(left), change)
    tl.store(state + places, matrix, mask=inside)
