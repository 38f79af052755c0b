"""The two halves of a decoder layer: attention and MLP. They own packed weights; a step's state is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import AdapterRows, LayerCache, Rows, StepLayout
from headrace.models.adapters import in_step, multiply
from headrace.models.spec import Activation

PLAIN = {"gelu_tanh": ops.gelu_tanh, "gelu": ops.gelu, "relu": ops.relu, "relu2": ops.relu2}


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or LayerNorm if it has a bias."""

    weight: Tensor  # [H] float32
    bias: Tensor | None  # [H] float32
    eps: float

    def __call__(self, x: Tensor, *, as_fp8: bool = False) -> Rows:
        if self.bias is None:
            return ops.rms_norm(x, self.weight, self.eps, as_fp8=as_fp8)
        return ops.layer_norm(x, self.weight, self.bias, self.eps, as_fp8=as_fp8)

    def of_sum(self, x: ops.Addend, residual: Tensor, *, as_fp8: bool = False) -> Rows:
        """Adds x to `residual` in place and returns the norm of the sum."""
        if self.bias is None:
            return ops.add_rms_norm(x, residual, self.weight, self.eps, as_fp8=as_fp8)
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, as_fp8=as_fp8)

    def left_to_linear(
        self, x: ops.Addend | None, residual: Tensor, *, keeps_normed: bool = False
    ) -> tuple[ops.UnnormedRows, Tensor]:
        """Leaves the norm, and the addition of x, to the linear layer that follows. Returns its input and the residual
        stream, which that layer fills, as it does the normed rows if they are kept."""
        normed = torch.empty_like(residual) if keeps_normed else None
        if x is None:
            return ops.UnnormedRows(residual, None, None, self.weight, self.eps, normed), residual
        total = torch.empty_like(residual)
        return ops.UnnormedRows(ops.sum_routes(x), residual, total, self.weight, self.eps, normed), total

    def plain(self, x: Tensor) -> Tensor:
        """Returns the norm in the type of x, never in FP8."""
        normed = self(x)
        assert isinstance(normed, Tensor)
        return normed


class QueryKeyNorms(Protocol):
    def __call__(self, qkv: Tensor) -> None:
        """Norms in place. The columns are queries, keys, values."""

    def key_gains(self, num_kv_heads: int) -> Tensor:  # [Hkv, D]
        """The weights of the keys' norms."""


@dataclass(frozen=True, slots=True)
class WideNorms:
    """Norms over all query heads of a token, and over all key heads."""

    queries: Norm
    keys: Norm

    def __call__(self, qkv: Tensor) -> None:
        num_queries, num_keys = len(self.queries.weight), len(self.keys.weight)
        queries, keys = qkv[:, :num_queries], qkv[:, num_queries : num_queries + num_keys]
        queries.copy_(self.queries.plain(queries))
        keys.copy_(self.keys.plain(keys))

    def key_gains(self, num_kv_heads: int) -> Tensor:
        return self.keys.weight.view(num_kv_heads, -1)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """LayerNorm without bias of each query and key head, with weights of its own."""

    weight: Tensor  # [Hq + Hkv, D] float32
    eps: float

    def __call__(self, qkv: Tensor) -> None:
        num_heads, head_dim = self.weight.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)[:, :num_heads]
        heads.copy_(F.layer_norm(heads.float(), (head_dim,), eps=self.eps) * self.weight)

    def key_gains(self, num_kv_heads: int) -> Tensor:
        return self.weight[-num_kv_heads:]


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention over the paged cache, with Hq query heads and Hkv key-value heads of size D."""

    qkv: ops.PackedLinear  # [(Hq + 2 * Hkv) * D, H]
    output: ops.PackedLinear  # [H, Hq * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    wide_norms: QueryKeyNorms | None  # norms with weights of all heads
    cos_sin: Tensor  # [max_len, D] float32, shared by all layers with the same rope
    query_scales: Tensor | None  # [max_len] float32, factors of the queries at each position
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int | None
    slides: bool  # the window slides with the token; else the context is chunked
    softcap: float | None
    eps: float
    clip: float | None = None  # queries, keys and values are clamped to this size
    sinks: Tensor | None = None  # [Hq] float32, a score of each head without a value
    slopes: Tensor | None = None  # [Hq] float32, of ALiBi: how much scores fall with the distance
    gate: ops.PackedLinear | None = None  # [Hq * D, H], the output is multiplied by its sigmoid
    key_units: tuple[float, ...] = ()  # [Hkv], for an FP8 cache; empty: the keys are those of another layer

    @property
    def input_linear(self) -> ops.PackedLinear | None:
        """The linear layer that reads the input; None: several do."""
        return self.qkv if self.gate is None else None

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        gate = None if self.gate is None else self.gate(x)
        return self.attend(multiply(self.qkv, x, layout.adapters), layout, cache, kept, gate=gate)

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input, so that their kernels are loaded."""
        self.qkv(x)
        if self.gate is not None:
            self.gate(x)
        self.output(x.new_zeros(len(x), self.num_heads * self.cos_sin.shape[1]))

    def attend(
        self,
        qkv: Tensor,
        layout: StepLayout,
        cache: LayerCache,
        kept: Tensor | None = None,
        *,
        gate: Tensor | None = None,  # [T, Hq * D], before its sigmoid
    ) -> Tensor:
        """Maps queries, keys and values, which are changed, to the output [T, H]."""
        if self.wide_norms is not None:
            self.wide_norms(qkv)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        mixed = self._mixed(qkv, layout, cache)
        if gate is not None:
            mixed = mixed.mul_(gate.sigmoid_())
        return multiply(self.output, mixed if kept is None else mixed[kept], layout.adapters_of(kept))

    def _mixed(self, qkv: Tensor, layout: StepLayout, cache: LayerCache) -> Tensor:  # [T, Hq * D]
        """The values, mixed by attention."""
        if self.query_scales is None and ops.takes_few_decodes(qkv, layout, self.cos_sin.shape[1]):
            return ops.rope_and_attend(
                qkv, layout, self.cos_sin, cache, self.num_heads, self.num_kv_heads,
                self.q_norm, self.k_norm, self.eps, self.scale, self.window, self.softcap,
                slides=self.slides, sinks=self.sinks, slopes=self.slopes,
            )  # fmt: skip
        q = ops.rope_and_store(
            qkv, layout, self.cos_sin, cache, self.num_heads, self.num_kv_heads, self.q_norm, self.k_norm, self.eps
        )
        if self.query_scales is not None:
            q.mul_(self.query_scales.index_select(0, layout.positions)[:, None, None])
        return ops.paged_attention(
            q, cache, layout, self.scale, self.window, self.softcap,
            slides=self.slides, sinks=self.sinks, slopes=self.slopes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mlp:
    up: ops.PackedLinear  # [I, H], or with a gate before it [2 * I, H]
    down: ops.PackedLinear  # [H, I]
    activation: Activation
    is_gated: bool

    def __call__(self, x: Rows, adapters: AdapterRows | None = None) -> Tensor:  # [T, H]
        as_fp8 = in_step(self.down, adapters).prefers_fp8(ops.num_rows_of(x))
        return multiply(self.down, self._activated(x, adapters, as_fp8=as_fp8), adapters)

    def _activated(self, x: Rows, adapters: AdapterRows | None, *, as_fp8: bool) -> Rows:  # [T, I]
        if self.is_gated and adapters is None:
            return ops.gated_linear(in_step(self.up, None), x, self.activation, as_fp8=as_fp8)
        up = multiply(self.up, x, adapters)
        activate = ops.GATED[self.activation] if self.is_gated else PLAIN[self.activation]
        return activate(up, as_fp8=as_fp8)
