"""The two halves of a decoder layer. They hold packed weights and nothing of a step, which is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout
from headrace.models.spec import Activation

_ACTIVATIONS = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention over the paged cache. Hq query heads, Hkv key-value heads of D."""

    qkv: ops.PackedLinear  # [(Hq + 2 * Hkv) * D, H]
    output: ops.PackedLinear  # [H, Hq * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    cos_sin: Tensor  # [max_len, D] float32, one for all layers of the same rope
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int | None
    softcap: float | None
    eps: float

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or of the `kept` tokens only."""
        q = ops.rope_and_store(
            self.qkv(x),
            layout,
            self.cos_sin,
            cache,
            self.num_heads,
            self.num_kv_heads,
            self.q_norm,
            self.k_norm,
            self.eps,
        )
        mixed = ops.paged_attention(q, cache, layout, self.scale, self.window, self.softcap)
        return self.output(mixed if kept is None else mixed[kept])


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: ops.PackedLinear  # [2 * I, H]
    down: ops.PackedLinear  # [H, I]
    activation: Activation

    def __call__(self, x: Rows) -> Tensor:  # [T, H]
        return self.down(_ACTIVATIONS[self.activation](self.gate_up(x), as_fp8=self.down.takes_fp8))


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor  # [H]
    attention: Attention
    attention_post_norm: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    mlp: GatedMlp
    mlp_post_norm: Tensor | None  # [H]
