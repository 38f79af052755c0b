"""What a layer mixes tokens with: attention, a mixer with a recurrent state, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, Rows, StepLayout
from headrace.models.layers import Attention


class Mixer(Protocol):
    @property
    def takes_fp8(self) -> bool: ...  # whether the norm before it should return FP8 rows

    @property
    def linears(self) -> tuple[tuple[ops.PackedLinear, int], ...]:
        """Its GEMMs, each with the width of its input."""

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens. Keys, values and states of all tokens are stored."""


@dataclass(frozen=True, slots=True)
class BothMixers:
    """Attention and a mixer with a recurrent state read the same input; their outputs are added (Falcon-H1)."""

    attention: Attention
    recurrent: Mixer

    @property
    def takes_fp8(self) -> bool:
        return self.attention.takes_fp8 and self.recurrent.takes_fp8

    @property
    def linears(self) -> tuple[tuple[ops.PackedLinear, int], ...]:
        return (*self.attention.linears, *self.recurrent.linears)

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        return self.attention(x, layout, cache, kept).add_(self.recurrent(x, layout, cache, kept))
