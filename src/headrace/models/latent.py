"""Multi-head latent attention of DeepSeek: keys and values are computed from a short vector per token, the latent.

The cache holds the latents and the part of the keys that rotates, which all heads share. The matrices that would
compute keys and values from latents are applied to the other side instead: to the queries before attention, and to its
output after it. So attention has one head of keys, R + rotary_dim long, and the latents themselves are its values.

    x ─▶ query latent ─▶ queries ─▶ key_up ─▶ q [Hq, R + rotary_dim] ─▶ attention ─▶ value_up ─▶ output
      ├▶ latent, normed ─┬──────────────────▶ cache ──────────────────────┘
      └▶ rotated keys ───┘
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout
from headrace.models.layers import Norm
from headrace.models.rope import head_order
from headrace.models.spec import LatentSpec


def rotary_order(latent: LatentSpec, *, rotates_pairs: bool) -> list[int]:
    """Returns which of the checkpoint's rotary dimensions is at each index of ours, where halves rotate."""
    order = head_order(latent.rotary_dim, None, rotates_pairs=rotates_pairs)
    return list(range(latent.rotary_dim)) if order is None else order


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Self-attention of Hq query heads over a cache of latents. Has the interface of `Attention`."""

    down: ops.PackedLinear  # [query rank + R + rotary_dim, H]; without a query latent its queries instead of its rank
    query_norm: Norm | None
    query_up: ops.PackedLinear | None  # [Hq * (still_dim + rotary_dim), query rank]; None: no query latent
    kv_norm: Norm
    key_up: Tensor  # [Hq, still_dim, R]
    value_up: Tensor  # [Hq, R, value_dim]
    output: ops.PackedLinear  # [H, Hq * value_dim]
    cos_sin: Tensor  # [max_len, rotary_dim] float32
    latent: LatentSpec
    scale: float

    @property
    def input_linear(self) -> ops.PackedLinear:
        """The linear layer that reads the input."""
        return self.down

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        rank, rotary_dim = self.latent.kv_rank, self.latent.rotary_dim
        first = self.down(x)
        queries, latents, rotary_keys = first.split((first.shape[1] - rank - rotary_dim, rank, rotary_dim), dim=1)
        q = self._absorbed(queries)
        latents = self.kv_norm.plain(latents.contiguous())
        ops.rope_and_store_latent(q, latents, rotary_keys, layout, self.cos_sin, cache)
        mixed = ops.latent_attention(q, cache, layout, self.scale)  # [T, Hq, R]
        mixed = mixed if kept is None else mixed[kept]
        values = torch.bmm(mixed.transpose(0, 1), self.value_up)  # [Hq, T, value_dim]
        return self.output(values.transpose(0, 1).flatten(1))

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input, so that their kernels are loaded."""
        first = self.down(x)
        q = self._absorbed(first[:, : first.shape[1] - self.latent.cache_dim])
        values = torch.bmm(q[:, :, : self.latent.kv_rank].transpose(0, 1), self.value_up)
        self.output(values.transpose(0, 1).flatten(1))

    def _absorbed(self, queries: Tensor) -> Tensor:
        """Returns queries for the space of latents, [T, Hq, R + rotary_dim], of which the last do not rotate yet."""
        if self.query_up is not None and self.query_norm is not None:
            queries = self.query_up(
                self.query_norm(queries.contiguous(), as_fp8=self.query_up.prefers_fp8(len(queries)))
            )
        rank, still_dim = self.latent.kv_rank, self.latent.still_dim
        heads = queries.reshape(queries.shape[0], len(self.key_up), -1)
        q = heads.new_empty(*heads.shape[:2], rank + self.latent.rotary_dim)
        q[:, :, :rank] = torch.bmm(heads[:, :, :still_dim].transpose(0, 1), self.key_up).transpose(0, 1)
        q[:, :, rank:] = heads[:, :, still_dim:]
        return q
