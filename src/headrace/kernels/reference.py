"""Every operation in plain PyTorch: the specification, the test of the fast kernels, and the fallback without them.

Sums are in float32 whatever the type of the input. T tokens, Hq and Hkv query and kv heads, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import Fp8Rows, LayerCache, PackedLayout, Routes, Rows, StepLayout, UnnormedRows
from headrace.kernels.quantized import QuantizedWeight, dequantize
from headrace.kernels.reference_adapters import add_low_rank  # noqa: F401  a part of the reference in its own file
from headrace.kernels.reference_recurrent import (  # noqa: F401  parts of the reference in a file of their own
    causal_conv,
    gated_delta_rule,
    gated_norm,
    selective_scan,
)

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
CLAMP = 7.0  # of gpt-oss: the gate has this maximum, the other half this size
CLAMPED_SILU_SLOPE = 1.702


class PackedLinear:
    """A weight matrix and its bias; other devices pack them into the form that they multiply fastest."""

    takes_fp8 = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [N, K]
        self._bias = bias  # [N]

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        return F.linear(x, self._weight, self._bias)


class Fp8Linear:
    """FP8 weights with one scale per output channel, times FP8 activations with one scale per row."""

    takes_fp8 = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = quantize_rows(weight)  # [N, K]
        self._bias = bias
        self._dtype = weight.dtype

    def __call__(self, x: Rows) -> Tensor:  # [T, K] -> [T, N]
        assert not isinstance(x, UnnormedRows)
        rows = quantize_rows(x) if isinstance(x, Tensor) else x
        out = (rows.values.float() @ self._weight.values.float().t()) * rows.scales * self._weight.scales.t()
        return (out if self._bias is None else out + self._bias.float()).to(self._dtype)


def pack_linear(weight: Tensor, bias: Tensor | None = None, *, as_fp8: bool = False) -> PackedLinear | Fp8Linear:
    """See `ops.pack_linear`."""
    return Fp8Linear(weight, bias) if as_fp8 else PackedLinear(weight, bias)


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear:
    """See `ops.pack_quantized`. Dequantizes."""
    return PackedLinear(dequantize(weight).to(dtype), bias)


class PackedExperts:
    """One matrix per expert; experts without routes are skipped."""

    def __init__(self, weight: Tensor, pack: Callable[[Tensor], Any]) -> None:  # [E, N, K]; `pack` gives a PackedLinear
        self._linears = [pack(matrix) for matrix in weight]
        self.takes_fp8: bool = self._linears[0].takes_fp8
        self._num_columns, self._dtype = weight.shape[1], weight.dtype

    def __call__(self, x: Rows, routes: Routes, *, weighs: bool = False) -> Tensor:  # [T or R, K] -> [R, N]
        assert not isinstance(x, UnnormedRows)
        num_routes, num_rows = routes.order.shape[0], (x if isinstance(x, Tensor) else x.values).shape[0]
        routes_per_row = num_routes // num_rows if num_rows else 1
        out = torch.empty(num_routes, self._num_columns, dtype=self._dtype, device=routes.order.device)
        begin = 0
        for linear, end in zip(self._linears, routes.ends.tolist(), strict=True):
            if begin < end:
                chosen = routes.order[begin:end].long()
                results = linear(_rows_at(x, chosen // routes_per_row))
                out[chosen] = (results * routes.weights[chosen, None]).to(self._dtype) if weighs else results
            begin = end
        return out


def pack_experts(weight: Tensor, *, as_fp8: bool = False) -> PackedExperts:  # [E, N, K]
    return PackedExperts(weight, Fp8Linear if as_fp8 else PackedLinear)


def _rows_at(x: Tensor | Fp8Rows, indexes: Tensor) -> Rows:
    return x[indexes] if isinstance(x, Tensor) else Fp8Rows(x.values[indexes], x.scales[indexes])


def route(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E]
    scale: float = 1.0,
    jitter: float = 0.0,
    num_groups: int = 1,
    num_groups_chosen: int = 1,
) -> Routes:
    """Sends each token to the experts of its highest logits, and sorts the routes by expert."""
    groups = (num_groups, num_groups_chosen)
    chosen, weights = choose_experts(logits, num_chosen, rule, correction=correction, jitter=jitter, groups=groups)
    experts = chosen.flatten()
    ends = torch.bincount(experts, minlength=logits.shape[1]).cumsum(0)
    return Routes(weights.flatten() * scale, experts.argsort(stable=True).int(), ends.int())


def choose_experts(
    logits: Tensor,  # [T, E]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None,
    jitter: float = 0.0,
    groups: tuple[int, int] = (1, 1),  # how many there are, and how many of them each token may choose from
) -> tuple[Tensor, Tensor]:  # [T, num_chosen] twice
    """Returns the experts of each token and the weights of its routes, without their scale."""
    wide = logits.float()
    chosen = _choose(wide, num_chosen, rule, correction, groups)
    highest = wide.gather(-1, chosen)
    if rule == "sparsemixer":
        weights = _sparsemixer_weights(wide, chosen, jitter)
    elif rule in ("sigmoid", "sigmoid_of_chosen"):
        weights = highest.sigmoid()
        if rule == "sigmoid_of_chosen":
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        whole = wide if rule == "softmax" else highest
        weights = (highest - whole.logsumexp(-1, keepdim=True)).exp()
    return chosen, weights


def _choose(
    logits: Tensor, num_chosen: int, rule: str, correction: Tensor | None, groups: tuple[int, int]
) -> Tensor:  # [T, num_chosen]
    scores = logits
    if correction is not None:
        scores = (logits.sigmoid() if rule.startswith("sigmoid") else logits.softmax(-1)) + correction
    num_groups, num_groups_chosen = groups
    if num_groups_chosen < num_groups:
        scores = _within_groups(scores, num_groups, num_groups_chosen, num_best=1 if correction is None else 2)
    return scores.topk(num_chosen, dim=-1).indices


def _within_groups(scores: Tensor, num_groups: int, num_groups_chosen: int, *, num_best: int) -> Tensor:  # [T, E]
    """Hides the experts of all groups but those whose best experts have the highest sum of scores."""
    by_group = scores.unflatten(-1, (num_groups, -1))  # [T, groups, experts of a group]
    best = by_group.topk(num_best, dim=-1).values.sum(-1)
    chosen = best.topk(num_groups_chosen, dim=-1).indices
    is_hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    visible: Tensor = by_group.masked_fill(is_hidden[:, :, None], float("-inf"))
    return visible.flatten(-2)


def _sparsemixer_weights(logits: Tensor, chosen: Tensor, jitter: float) -> Tensor:  # [T, num_chosen]
    """The share of each chosen expert among those not chosen before it whose logits are nearly as high."""
    left, weights = logits, []
    for experts in chosen.split(1, dim=-1):
        best = logits.gather(-1, experts)
        is_near = (best - logits) / logits.abs().maximum(best) <= 2 * jitter
        weights.append(1 / (left - best).exp().where(is_near, 0.0).sum(-1, keepdim=True))
        left = left.scatter(-1, experts, float("-inf"))
    return torch.cat(weights, dim=-1)


def quantize_rows(x: Tensor) -> Fp8Rows:  # [T, K]
    """Quantizes each row to FP8 with its own scale."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return Fp8Rows((wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """See `ops.allocate_cache`."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(
        keys=torch.empty(shape, dtype=dtype, device=device), values=torch.empty(shape, dtype=dtype, device=device)
    )


def allocate_latent_cache(
    num_blocks: int, block_size: int, rank: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """See `ops.allocate_latent_cache`."""
    keys = torch.empty((num_blocks, 1, block_size, rank + rotary_dim), dtype=dtype, device=device)
    return LayerCache.of_latents(keys, rank)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:  # [T], [V, H] -> [T, H]
    return table.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., H], [H] -> [..., H]
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    residual += x
    return rms_norm(residual, weight, eps)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(rms_norm(x, weight, eps))


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(add_rms_norm(x, residual, weight, eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:  # [..., H], [H], [H] -> [..., H]
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place and returns the norm of the sum. All [T, H]."""
    residual += x
    return layer_norm(residual, weight, bias, eps)


def layer_norm_fp8(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(layer_norm(x, weight, bias, eps))


def add_layer_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Fp8Rows:
    return quantize_rows(add_layer_norm(x, residual, weight, bias, eps))


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
    k = _rotate(k, angles)
    _store(cache.keys, blocks, offsets, k)
    _store(cache.values, blocks, offsets, v)
    return _rotate(q, angles)


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
    """Stores keys or values. What exceeds the range of FP8 becomes its largest value."""
    if side.dtype == FP8:
        narrow = x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)
        side.view(torch.uint8)[blocks, :, offsets] = narrow.view(torch.uint8)
    else:
        side[blocks, :, offsets] = x


def _rotate(x: Tensor, angles: Tensor) -> Tensor:  # [T, heads, D], [T, 1, D] -> [T, heads, D]
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
        values = _gather(cache.values, blocks, context_len)
        out[tokens] = _attend(
            q[tokens], keys, values, layout.positions[tokens], scale, window, softcap, slides, sinks, slopes
        )
    return out.flatten(1)


def _gather(side: Tensor, blocks: Tensor, context_len: int) -> Tensor:
    """Returns the first `context_len` keys or values of a sequence, [Hkv, context_len, D]."""
    chosen = side.view(torch.uint8)[blocks].view(FP8) if side.dtype == FP8 else side[blocks]
    return chosen.transpose(0, 1).flatten(1, 2)[:, :context_len].float()


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


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def clamped_silu_and_mul(gate_up: Tensor) -> Tensor:  # [T, 2 * I] -> [T, I]
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(CLAMPED_SILU_SLOPE * gate) * (up + 1)


def clamped_silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(clamped_silu_and_mul(gate_up))


def silu_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(silu_and_mul(gate_up))


def gelu_tanh_and_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    return quantize_rows(gelu_tanh_and_mul(gate_up))


def gelu(x: Tensor) -> Tensor:  # [T, I]
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:  # [T, I]
    return F.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:  # [T, I]
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:  # [T, I]
    return torch.relu(x).square()


def relu_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(relu(x))


def relu2_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(relu2(x))


def gelu_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(gelu(x))


def gelu_tanh_fp8(x: Tensor) -> Fp8Rows:
    return quantize_rows(gelu_tanh(x))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Computes cap * tanh(x / cap) in place."""
    return x.div_(cap).tanh_().mul_(cap)


def apply_bitmask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Sets logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is not set."""
    is_set = (bits[:, :, None] >> torch.arange(32, device=bits.device, dtype=bits.dtype)) & 1  # [Q, words, 32]
    forbidden = is_set.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def copy_blocks(caches: list[LayerCache], sources: Tensor, targets: Tensor) -> None:
    """Copies blocks sources[i] to targets[i] in every layer. No block may be both a source and a target."""
    for cache in caches:
        for side in (cache.keys, cache.values):  # of latents both are the same memory
            plain = side.view(torch.uint8) if side.dtype == FP8 else side  # every device can index bytes
            plain[targets] = plain[sources]


def copy_blocks_to_rows(sides: Sequence[Tensor], blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies blocks[i] of all sides (`LayerCache.raw_sides`) to rows[places[i]], [num_places, words of all sides]."""
    start = 0
    for side in sides:
        rows[places, start : start + side.shape[1]] = side[blocks]
        start += side.shape[1]


def copy_rows_to_blocks(sides: Sequence[Tensor], blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies rows[places[i]] to blocks[i] of all sides."""
    start = 0
    for side in sides:
        side[blocks] = rows[places, start : start + side.shape[1]]
        start += side.shape[1]
