"""The operations with a recurrent state in plain PyTorch, token by token: the specification of the faster forms.

Each updates the state of its slots in place. T tokens, C channels, K tokens of a convolution; of the state spaces H
heads of size P in G groups with states of size N; of the delta rule Hk key heads of size K and H value heads of size V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import StepLayout

L2_EPS = 1e-6  # of the norms of queries and keys in the delta rule


class Span(NamedTuple):
    """The tokens of one sequence in a step."""

    slot: int
    begin: int
    end: int
    is_first: bool  # it starts with this step, so its state is zero


def spans_of(layout: StepLayout) -> Iterator[Span]:
    """Reads the layout on the host. Sequences without tokens, which are padding, are left out."""
    starts, slots, context_lens = (x.tolist() for x in (layout.query_starts, layout.slots, layout.context_lens))
    for slot, begin, end, context_len in zip(slots, starts, starts[1:], context_lens, strict=False):
        if begin < end:
            yield Span(slot, begin, end, context_len == end - begin)


def before(span: Span, state: Tensor) -> Tensor:
    """A copy of the slot's state before the step, in float32."""
    own = state[span.slot].float()
    return torch.zeros_like(own) if span.is_first else own.clone()


def causal_conv(
    x: Tensor,  # [T, C]
    layout: StepLayout,
    state: Tensor,  # [num_slots, K - 1, C]
    weight: Tensor,  # [C, K]
    bias: Tensor | None = None,  # [C]
    *,
    activates: bool,
) -> Tensor:  # [T, C]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for span in spans_of(layout):
        num_tokens = span.end - span.begin
        inputs = torch.cat([before(span, state), x[span.begin : span.end].float()])  # [K - 1 + num_tokens, C]
        state[span.slot] = inputs[num_tokens:].to(state.dtype)
        windows = inputs.unfold(0, weight.shape[1], 1)  # [num_tokens, C, K]
        mixed = (windows * weight.float()).sum(2)
        mixed = mixed if bias is None else mixed + bias.float()
        out[span.begin : span.end] = (F.silu(mixed) if activates else mixed).to(x.dtype)
    return out


def selective_scan(
    x: Tensor,  # [T, H, P]
    b: Tensor,  # [T, G, N]
    c: Tensor,  # [T, G, N]
    dt: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, P, N] float32
    *,
    rate: Tensor,  # [H] float32, negative
    skip: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, P]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_group = x.shape[1] // b.shape[1]
    keys, queries = (part.float().repeat_interleave(per_group, dim=1) for part in (b, c))  # [T, H, N]
    steps, wide = F.softplus(dt.float() + dt_bias), x.float()
    for span in spans_of(layout):
        matrices = before(span, state)
        for token in range(span.begin, span.end):
            step = steps[token, :, None, None]
            matrices *= (step * rate[:, None, None]).exp()
            matrices += step * wide[token, :, :, None] * keys[token, :, None, :]
            read = (matrices * queries[token, :, None, :]).sum(2)
            out[token] = (read + skip[:, None] * wide[token]).to(x.dtype)
        state[span.slot] = matrices
    return out


def gated_delta_rule(
    q: Tensor,  # [T, Hk, K]
    k: Tensor,  # [T, Hk, K]
    v: Tensor,  # [T, H, V]
    a: Tensor,  # [T, H]
    b: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, K, V] float32
    *,
    rate: Tensor,  # [H] float32, negative
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, V]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    queries, keys = delta_queries_and_keys(q, k, v.shape[1])
    decays, betas, values = (rate * F.softplus(a.float() + dt_bias)).exp(), b.float().sigmoid(), v.float()
    for span in spans_of(layout):
        matrices = before(span, state)  # [H, K, V]
        for token in range(span.begin, span.end):
            matrices *= decays[token, :, None, None]
            held = (matrices * keys[token, :, :, None]).sum(1)  # what the key held so far
            change = betas[token, :, None] * (values[token] - held)
            matrices += keys[token, :, :, None] * change[:, None, :]
            out[token] = (matrices * queries[token, :, :, None]).sum(1).to(v.dtype)
        state[span.slot] = matrices
    return out


def delta_queries_and_keys(q: Tensor, k: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:  # [T, H, K] twice, float32
    """Returns them with unit length, the queries scaled, for all value heads."""

    def unit(x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)
        return wide.repeat_interleave(num_heads // x.shape[1], dim=1)

    return unit(q) * q.shape[2] ** -0.5, unit(k)


def gated_norm(
    x: Tensor,  # [T, I]
    gate: Tensor,  # [T, I]
    weight: Tensor | None,  # [I], or [group_size] for all groups
    eps: float,
    *,
    group_size: int,
    norm_first: bool,
) -> Tensor:  # [T, I]
    wide, opened = x.float(), F.silu(gate.float())
    if not norm_first:
        wide = wide * opened
    if weight is not None:
        groups = wide.unflatten(-1, (-1, group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        wide = (groups * weight.float().view(-1, group_size)).flatten(-2)
    return (wide * opened if norm_first else wide).to(x.dtype)
