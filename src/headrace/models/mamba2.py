"""The mixer of Mamba 2: a convolution over a few tokens, then a state space with one scalar decay per head.

x ─▶ gate ──────────────────────────▶ norm and gate ─▶ output
  ├▶ inputs, B, C ─▶ convolution ─▶ scan ─┘
  └▶ dt ──────────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout
from headrace.models.recurrent_specs import Mamba2Spec


@dataclass(frozen=True, slots=True)
class Mamba2:
    spec: Mamba2Spec
    projection: ops.PackedLinear  # [gate, inputs, B, C, dt; H]
    conv_weight: Tensor  # [C, K]
    conv_bias: Tensor | None  # [C]
    rate: Tensor  # [heads] float32, negative: how fast a head forgets
    skip: Tensor  # [heads] float32
    dt_bias: Tensor  # [heads] float32
    norm: Tensor | None  # [inner size] float32
    eps: float
    output: ops.PackedLinear  # [H, inner size]

    @property
    def input_linear(self) -> ops.PackedLinear | None:
        """The linear layer that reads the input."""
        return self.projection

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input, so that their kernels are loaded."""
        self.projection(x)
        self.output(x.new_zeros(len(x), self.spec.inner_size))

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        spec, state = self.spec, cache.state
        assert state is not None and state.matrices is not None
        of_groups = spec.num_groups * spec.state_size
        gate, conv_input, dt = self.projection(x).split((spec.inner_size, spec.conv_size, spec.num_heads), dim=1)
        conv = ops.causal_conv(conv_input, layout, state.conv, self.conv_weight, self.conv_bias, activates=True)
        inputs, b, c = conv.split((spec.inner_size, of_groups, of_groups), dim=1)
        scanned = ops.selective_scan(
            inputs.unflatten(1, (spec.num_heads, spec.head_dim)),
            b.unflatten(1, (spec.num_groups, spec.state_size)),
            c.unflatten(1, (spec.num_groups, spec.state_size)),
            dt,
            layout,
            state.matrices,
            rate=self.rate,
            skip=self.skip,
            dt_bias=self.dt_bias,
        ).flatten(1)
        if kept is not None:
            scanned, gate = scanned[kept], gate[kept]
        mixed = ops.gated_norm(
            scanned,
            gate,
            self.norm,
            self.eps,
            group_size=spec.inner_size // spec.num_groups,  # as mamba_ssm, vLLM and llama.cpp; transformers: all in one
            norm_first=spec.norm == "norm_first",
        )
        return self.output(mixed)
