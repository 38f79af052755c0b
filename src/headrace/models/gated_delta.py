"""The gated delta net of Qwen3-Next and Qwen3.5: linear attention whose state forgets by a gate, and overwrites what a
key held before.

    x ─▶ queries, keys, values ─▶ convolution ─▶ delta rule ─▶ norm and gate ─▶ output
      ├▶ decay and write strength of each head ──┘              │
      └▶ output gate ───────────────────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout
from headrace.models.recurrent_specs import GatedDeltaSpec


@dataclass(frozen=True, slots=True)
class GatedDelta:
    spec: GatedDeltaSpec
    projection: ops.PackedLinear  # [queries, keys, values, output gate, write strength, decay; H]
    conv_weight: Tensor  # [C, K]
    rate: Tensor  # [heads] float32, negative: how fast a head forgets
    dt_bias: Tensor  # [heads] float32
    norm: Tensor  # [value_dim] float32, the same for all heads
    eps: float
    output: ops.PackedLinear  # [H, heads * value_dim]

    @property
    def input_linear(self) -> ops.PackedLinear | None:
        """The linear layer that reads the input."""
        return self.projection

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input, so that their kernels are loaded."""
        self.projection(x)
        self.output(x.new_zeros(len(x), self.spec.num_heads * self.spec.value_dim))

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        spec, state = self.spec, cache.state
        assert state is not None and state.matrices is not None
        num_heads, keys, values = spec.num_heads, spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        conv_input, gate, b, a = self.projection(x).split((spec.conv_size, values, num_heads, num_heads), dim=1)
        conv = ops.causal_conv(conv_input, layout, state.conv, self.conv_weight, activates=True)
        q, k, v = conv.split((keys, keys, values), dim=1)
        read = ops.gated_delta_rule(
            q.unflatten(1, (spec.num_key_heads, spec.key_dim)),
            k.unflatten(1, (spec.num_key_heads, spec.key_dim)),
            v.unflatten(1, (num_heads, spec.value_dim)),
            a,
            b,
            layout,
            state.matrices,
            rate=self.rate,
            dt_bias=self.dt_bias,
        ).flatten(1)
        if kept is not None:
            read, gate = read[kept], gate[kept]
        return self.output(ops.gated_norm(read, gate, self.norm, self.eps, group_size=spec.value_dim, norm_first=True))
