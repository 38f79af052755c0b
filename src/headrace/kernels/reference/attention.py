"""Rotary embeddings and attention: over the paged cache, over a cache of latents, and without a cache."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import LayerCache, PackedLayout, StepLayout
from headrace.kernels.reference.e3m4 import decode_e3m4, encode_e3m4
from headrace.kernels.reference.fp8 import FP8, FP8_MAX
from headrace.kernels.reference.norms import rms_norm

FLOAT16_MAX = torch.finfo(torch.float16).max


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [D], RMS norm of each head before the rotation
    k_norm: Tensor | None,  # [D]
    eps: float,
) -> Tensor:  # [T, Hq, D]
    """Rotates queries and keys, and stores keys and values where `slot_mapping` says. May use `qkv` as scratch."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    angles = cos_sin.index_select(0, layout.positions).unsqueeze(1)  # [T, 1, D]
    blocks, offsets = layout.slot_mapping // cache.block_size, layout.slot_mapping % cache.block_size
    keys = _rotate(k, angles, cache.hadamard_len)
    if cache.key_units is not None:
        keys = encode_e3m4(keys.float() / cache.key_units[:, None])
    _store(cache.keys, blocks, offsets, keys)
    _store(cache.values, blocks, offsets, v)
    return _rotate(q, angles, cache.hadamard_len)


def rope_and_store_latent(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    latents: Tensor,  # [T, R]
    rotary_keys: Tensor,  # [T, rotary_dim]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, rotary_dim] float32
    cache: LayerCache,
) -> None:
    """Rotates the last dimensions of the queries in place, and stores latents and rotated keys as one head."""
    rank = latents.shape[1]
    angles = cos_sin.index_select(0, layout.positions).unsqueeze(1)  # [T, 1, rotary_dim]
    q[:, :, rank:] = _rotate(q[:, :, rank:], angles)
    keys = torch.cat((latents.unsqueeze(1), _rotate(rotary_keys.unsqueeze(1), angles)), dim=-1)
    _store(cache.keys, layout.slot_mapping // cache.block_size, layout.slot_mapping % cache.block_size, keys)


def latent_attention(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
) -> Tensor:  # [T, Hq, R]
    return paged_attention(q, cache, layout, scale).view(*q.shape[:2], -1)


def _store(side: Tensor, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
    """Stores keys or values. What exceeds the range of a narrower type becomes its largest value."""
    if side.dtype == torch.float16 and x.dtype == torch.float32:
        side[blocks, :, offsets] = x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    elif side.dtype == FP8:
        narrow = x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)
        side.view(torch.uint8)[blocks, :, offsets] = narrow.view(torch.uint8)
    else:
        side[blocks, :, offsets] = x


def _rotate(x: Tensor, angles: Tensor, hadamard_len: int = 1) -> Tensor:  # [T, heads, D], [T, 1, D] -> [T, heads, D]
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _mix(rotated, hadamard_len).to(x.dtype)


def _mix(x: Tensor, length: int) -> Tensor:  # [..., D]
    """Multiplies each `length` neighbouring dimensions with the orthonormal Hadamard matrix."""
    matrix = torch.ones((1, 1), device=x.device)
    for _ in range(length.bit_length() - 1):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks: Tensor = x.unflatten(-1, (-1, length))  # [..., D / length, length]
    return (blocks @ matrix / math.sqrt(length)).flatten(-2)


def paged_attention(
    q: Tensor,  # [T, Hq, D]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq]
    slopes: Tensor | None = None,  # [Hq]
) -> Tensor:  # [T, Hq * D]
    """Attends from position p to positions max(0, p - window + 1)..p of the same sequence, read from the cache; or
    to p // window * window..p, if the window does not slide. A sink is one more score of its head, without a value.
    A slope lowers the scores of its head in proportion to the distance (ALiBi)."""
    out = q.new_empty(*q.shape[:2], cache.values.shape[3])
    starts = layout.query_starts.tolist()
    for seq, (slot, context_len) in enumerate(zip(layout.slots.tolist(), layout.context_lens.tolist(), strict=True)):
        tokens = slice(starts[seq], starts[seq + 1])
        blocks = layout.block_tables[slot, : -(-context_len // cache.block_size)].long()
        keys = _gather(cache.keys, blocks, context_len)
        if cache.key_units is not None:
            keys = keys * cache.key_units[:, None, None]
        values = _gather(cache.values, blocks, context_len)
        out[tokens] = _attend(
            q[tokens], keys, values, layout.positions[tokens], scale, window, softcap, slides, sinks, slopes
        )
    return out.flatten(1)


def _gather(side: Tensor, blocks: Tensor, context_len: int) -> Tensor:
    """Returns the first `context_len` keys or values of a sequence, [Hkv, context_len, D]; without units of keys."""
    chosen = side.view(torch.uint8)[blocks].view(FP8) if side.dtype == FP8 else side[blocks]
    found = chosen.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return decode_e3m4(found) if side.dtype == torch.uint8 else found.float()


def _attend(
    q: Tensor,  # [Q, Hq, D]
    keys: Tensor,  # [Hkv, C, D]
    values: Tensor,  # [Hkv, C, Dv]
    positions: Tensor,  # [Q]
    scale: float,
    window: int | None,
    softcap: float | None,
    slides: bool,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:  # [Q, Hq, Dv]
    group = q.shape[1] // keys.shape[0]  # query heads that share a kv head
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = scale * (q.float().transpose(0, 1) @ keys.transpose(1, 2))  # [Hq, Q, C]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(keys.shape[1], device=q.device)
    if slopes is not None:
        scores = scores + slopes.float()[:, None, None] * (key_positions - positions[:, None])
    hidden = key_positions > positions[:, None]  # [Q, C]
    if window is not None:
        first = positions - window + 1 if slides else positions // window * window
        hidden |= key_positions < first[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[:, :, :-1]
    return (weights @ values).transpose(0, 1).to(q.dtype)


def rotate(qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> None:
    """Rotates queries and keys in place."""
    heads = qkv.view(qkv.shape[0], 3 * num_heads, -1)[:, : 2 * num_heads]
    heads.copy_(_rotate(heads, cos_sin.index_select(0, positions).unsqueeze(1)))


def bidirectional_attention(
    qkv: Tensor,  # [T, 3 * H * D]
    layout: PackedLayout,
    num_heads: int,
    scale: float,
    reach: int | None = None,
) -> Tensor:  # [T, H * D]
    """Attends from each token to all tokens of its text, or to those up to `reach` before and after it. Texts of the
    same length that follow each other are computed together."""
    head_dim = qkv.shape[1] // (3 * num_heads)
    out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
    start = 0
    for text_len, group in itertools.groupby(layout.lens):
        end = start + text_len * len(list(group))
        sides = qkv[start:end].view(-1, text_len, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)  # [3, n, H, L, D]
        q, k, v = sides.unbind(0)
        is_seen = None
        if reach is not None and reach < text_len - 1:
            places = torch.arange(text_len, device=qkv.device)
            is_seen = (places[:, None] - places).abs() <= reach
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scale)  # [n, H, L, D]
        out[start:end] = mixed.transpose(1, 2).reshape(end - start, -1)
        start = end
    return out
