"""The short convolution of LFM2: x is gated, convolved over a few tokens, and gated again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout


@dataclass(frozen=True, slots=True)
class ShortConv:
    projection: ops.PackedLinear  # [3 * H, H]: the gate before the convolution, the one after it, and its input
    weight: Tensor  # [H, K]
    bias: Tensor | None  # [H]
    output: ops.PackedLinear  # [H, H]

    @property
    def takes_fp8(self) -> bool:
        return self.projection.takes_fp8

    @property
    def linears(self) -> tuple[tuple[ops.PackedLinear, int], ...]:
        width = self.weight.shape[0]
        return ((self.projection, width), (self.output, width))

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        state = cache.state
        assert state is not None
        gate, output_gate, inputs = self.projection(x).chunk(3, dim=1)
        mixed = ops.causal_conv(gate * inputs, layout, state.conv, self.weight, self.bias, activates=False)
        mixed = mixed.mul_(output_gate)
        return self.output(mixed if kept is None else mixed[kept])
