"""The operations with a recurrent state on a CPU: sequences that decode are one batch, prompts are computed in chunks.

Within a chunk, what tokens write and later ones read is a few GEMMs; between chunks the state is carried.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.layout import StepLayout
from headrace.kernels.reference.recurrent import (
    Span,
    before,
    causal_conv,
    delta_queries_and_keys,
    gated_norm,
    spans_of,
)

__all__ = ["causal_conv", "gated_delta_rule", "gated_norm", "selective_scan"]

CHUNK = 64  # tokens; the GEMMs within a chunk grow with its square
_Step = Callable[[Tensor, Tensor], Tensor]  # (tokens [S], their states) -> outputs [S, H, ...]; updates the states
_Chunk = Callable[[slice, Tensor], Tensor]  # (tokens, their slot's state) -> outputs [L, H, ...]; updates the state


def _run(out: Tensor, layout: StepLayout, state: Tensor, *, step: _Step, chunk: _Chunk) -> Tensor:
    spans = list(spans_of(layout))
    decodes = [span for span in spans if span.end - span.begin == 1]
    if decodes:
        tokens = torch.tensor([span.begin for span in decodes])
        slots = torch.tensor([span.slot for span in decodes])
        matrices = state[slots]
        matrices[torch.tensor([span.is_first for span in decodes])] = 0.0
        out[tokens] = step(tokens, matrices).to(out.dtype)
        state[slots] = matrices
    for span in spans:
        if span.end - span.begin > 1:
            _run_chunks(out, span, state, chunk)
    return out


def _run_chunks(out: Tensor, span: Span, state: Tensor, chunk: _Chunk) -> None:
    matrices = before(span, state)
    for begin in range(span.begin, span.end, CHUNK):
        tokens = slice(begin, min(begin + CHUNK, span.end))
        out[tokens] = chunk(tokens, matrices).to(out.dtype)
    state[span.slot] = matrices


def selective_scan(
    x: Tensor,  # [T, H, P]
    b: Tensor,  # [T, G, N]
    c: Tensor,  # [T, G, N]
    dt: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, P, N] float32
    *,
    rate: Tensor,  # [H] float32
    skip: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, P]
    """See `ops.selective_scan`. Heads are viewed as [G, R]: R heads of each group."""
    num_groups, per_group = b.shape[1], x.shape[1] // b.shape[1]
    steps = F.softplus(dt.float() + dt_bias)
    decays = steps * rate  # log of each token's factor
    stepped = x.float() * steps[:, :, None]

    def step(tokens: Tensor, matrices: Tensor) -> Tensor:
        matrices *= decays[tokens].exp()[:, :, None, None]
        grouped = matrices.unflatten(1, (num_groups, per_group))  # [S, G, R, P, N]
        written = stepped[tokens].unflatten(1, (num_groups, per_group))
        grouped.addcmul_(written.unsqueeze(-1), b[tokens].float()[:, :, None, None, :])
        return torch.matmul(grouped, c[tokens].float()[:, :, None, :, None]).squeeze(-1).flatten(1, 2)

    def chunk(tokens: slice, matrices: Tensor) -> Tensor:
        sums = decays[tokens].cumsum(0).t().contiguous()  # [H, L]
        keys, queries = (part[tokens].float().transpose(0, 1) for part in (b, c))  # [G, L, N]
        values = stepped[tokens].transpose(0, 1).unflatten(0, (num_groups, per_group))  # [G, R, L, P]
        grouped = matrices.unflatten(0, (num_groups, per_group))  # [G, R, P, N]
        scores = (queries @ keys.mT)[:, None] * _decays_between(sums).unflatten(0, (num_groups, per_group))
        carried = (queries[:, None] @ grouped.mT) * sums.exp().view(num_groups, per_group, -1, 1)
        out: Tensor = scores @ values + carried
        left = (sums[:, -1:] - sums).exp().view(num_groups, per_group, -1, 1)
        matrices *= sums[:, -1].exp()[:, None, None]
        grouped += (values * left).mT @ keys[:, None]
        result: Tensor = out.flatten(0, 1).transpose(0, 1)
        return result

    out = _run(torch.empty(x.shape, dtype=torch.float32), layout, state, step=step, chunk=chunk)
    return out.addcmul_(x.float(), skip[:, None]).to(x.dtype)


def _decays_between(sums: Tensor) -> Tensor:  # [H, L] -> [H, L, L]
    """The factor from each token to each later one, itself included; zero to earlier ones."""
    size = sums.shape[1]
    logs = sums[:, :, None] - sums[:, None, :]
    return logs.masked_fill_(torch.ones(size, size, dtype=torch.bool).triu_(1), float("-inf")).exp_()


def gated_delta_rule(
    q: Tensor,  # [T, Hk, K]
    k: Tensor,  # [T, Hk, K]
    v: Tensor,  # [T, H, V]
    a: Tensor,  # [T, H]
    b: Tensor,  # [T, H]
    layout: StepLayout,
    state: Tensor,  # [num_slots, H, K, V] float32
    *,
    rate: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H] float32
) -> Tensor:  # [T, H, V]
    """See `ops.gated_delta_rule`."""
    queries, keys = delta_queries_and_keys(q, k, v.shape[1])
    decays, betas = rate * F.softplus(a.float() + dt_bias), b.float().sigmoid()
    values = v.float()

    def step(tokens: Tensor, matrices: Tensor) -> Tensor:
        matrices *= decays[tokens].exp()[:, :, None, None]
        held = torch.matmul(keys[tokens].unsqueeze(2), matrices).squeeze(2)  # [S, H, V]
        change = betas[tokens].unsqueeze(-1) * (values[tokens] - held)
        matrices.addcmul_(keys[tokens].unsqueeze(-1), change.unsqueeze(2))
        return torch.matmul(queries[tokens].unsqueeze(2), matrices).squeeze(2)

    def chunk(tokens: slice, matrices: Tensor) -> Tensor:
        own_keys, own_queries, own_values = (part[tokens].transpose(0, 1) for part in (keys, queries, values))
        beta = betas[tokens].t().unsqueeze(-1)  # [H, L, 1]
        sums = decays[tokens].cumsum(0).t().contiguous()  # [H, L]
        between, since = _decays_between(sums), sums.exp().unsqueeze(-1)
        # Each token's change depends on those before it: a triangular system for all of the chunk at once.
        system = (beta * own_keys) @ own_keys.mT * between
        held = since * (own_keys @ matrices)
        change = torch.linalg.solve_triangular(system, beta * (own_values - held), upper=False, unitriangular=True)
        out: Tensor = since * (own_queries @ matrices) + (own_queries @ own_keys.mT * between) @ change
        matrices *= since[:, -1:]
        matrices += (own_keys * (sums[:, -1:] - sums).exp().unsqueeze(-1)).mT @ change
        result: Tensor = out.transpose(0, 1)
        return result

    out = _run(torch.empty(v.shape, dtype=torch.float32), layout, state, step=step, chunk=chunk)
    return out.to(v.dtype)
