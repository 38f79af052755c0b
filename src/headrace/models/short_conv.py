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
    def input_linear(self) -> ops.PackedLinear | None:
        """The linear layer that reads the input."""
        return self.projection

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input, so that their kernels are loaded."""
        self.projection(x)
        self.output(x.new_zeros(len(x), self.weight.shape[0]))

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens."""
        state = cache.state
        assert state is not None
        gate, output_gate, inputs = self.projection(x).chunk(3, dim=1)
        mixed = ops.causal_conv(gate * inputs, layout, state.conv, self.weight, self.bias, activates=False)
        mixed = mixed.mul_(output_gate)
        return self.output(mixed if kept is None else mixed[kept])
