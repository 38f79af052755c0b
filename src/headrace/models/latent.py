"""Multi-head latent attention of DeepSeek: queries, keys and values are computed from short vectors, the latents.

Keys and values are decompressed into the ordinary cache, so attention itself is that of all families. A head's
dimensions are in the order of `latent_head_order`; values, which are shorter than keys, are padded with zeros.

    x ─▶ query latent ─▶ queries                          the first GEMM gives both latents and the rotated part of the
      ├▶ KV latent ────▶ keys that do not rotate, values  keys, which all heads share
      └▶ rotated keys
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import Rows
from headrace.models.layers import Norm
from headrace.models.rope import head_order
from headrace.models.spec import LatentSpec


def latent_head_order(latent: LatentSpec, *, rotates_pairs: bool) -> list[int]:
    """Returns which dimension of the checkpoint's head, whose last dimensions rotate, is at each index of ours."""
    head_dim = latent.still_dim + latent.rotary_dim
    order = head_order(head_dim, latent.rotary_dim, rotates_pairs=rotates_pairs) or list(range(head_dim))
    return [(index + latent.still_dim) % head_dim for index in order]


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Computes queries, keys and values of Hq heads of size D. Has the interface of the GEMM that it replaces."""

    down: ops.PackedLinear  # [query rank + KV rank + rotary_dim, H]; without a query latent Hq * D instead of its rank
    query_norm: Norm | None
    query_up: ops.PackedLinear | None  # [Hq * D, query rank]; None: no query latent
    kv_norm: Norm
    kv_up: ops.PackedLinear  # [Hq * (still_dim + value_dim), KV rank]
    latent: LatentSpec
    num_heads: int
    rotates_pairs: bool

    @property
    def takes_fp8(self) -> bool:
        return self.down.takes_fp8

    def __call__(self, x: Rows) -> Tensor:  # [T, H] -> [T, 3 * Hq * D]
        latent, num_heads = self.latent, self.num_heads
        still_dim, value_dim, head_dim = latent.still_dim, latent.value_dim, latent.still_dim + latent.rotary_dim
        first = self.down(x)
        num_tokens, num_queries = first.shape[0], first.shape[1] - latent.kv_rank - latent.rotary_dim
        queries, kv_latent, rotated = first.split((num_queries, latent.kv_rank, latent.rotary_dim), dim=1)
        if self.query_up is not None and self.query_norm is not None:
            queries = self.query_up(self.query_norm(queries.contiguous(), as_fp8=self.query_up.takes_fp8))
        kv = self.kv_up(self.kv_norm(kv_latent.contiguous(), as_fp8=self.kv_up.takes_fp8))
        still, values = kv.view(num_tokens, num_heads, -1).split((still_dim, value_dim), dim=2)
        qkv = first.new_zeros(num_tokens, 3 * num_heads, head_dim)
        qkv[:, :num_heads] = queries.view(num_tokens, num_heads, head_dim)
        self._join_keys(qkv[:, num_heads : 2 * num_heads], still, rotated)
        qkv[:, 2 * num_heads :, :value_dim] = values
        return qkv.flatten(1)

    def _join_keys(self, keys: Tensor, still: Tensor, rotated: Tensor) -> None:
        """[T, Hq, D], [T, Hq, still_dim], [T, rotary_dim]: each half of a head starts with what rotates."""
        pairs = (rotated[:, ::2], rotated[:, 1::2]) if self.rotates_pairs else rotated.chunk(2, dim=1)
        for half, turning, resting in zip(keys.chunk(2, dim=2), pairs, still.chunk(2, dim=2), strict=True):
            half[:, :, : turning.shape[1]] = turning[:, None]
            half[:, :, turning.shape[1] :] = resting


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """The output projection: it reads the part of each head that values fill."""

    linear: ops.PackedLinear  # [H, Hq * value_dim]
    num_heads: int
    value_dim: int

    @property
    def takes_fp8(self) -> bool:
        return self.linear.takes_fp8

    def __call__(self, x: Rows) -> Tensor:  # [T, Hq * D] -> [T, H]
        assert isinstance(x, Tensor)
        return self.linear(x.view(x.shape[0], self.num_heads, -1)[:, :, : self.value_dim].flatten(1))
