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
    def input_linear(self) -> ops.PackedLinear | None:
        """The linear layer that reads the input; None: several do."""

    def run_gemms(self, x: Tensor) -> None:
        """Runs only the GEMMs, on any input [T, H], so that their kernels are loaded."""

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        """Maps [T, H] -> [T, H], or only the `kept` tokens. Keys, values and states of all tokens are stored."""


@dataclass(frozen=True, slots=True)
class BothMixers:
    """Attention and a mixer with a recurrent state read the same input; their outputs are added (Falcon-H1)."""

    attention: Attention
    recurrent: Mixer

    @property
    def input_linear(self) -> ops.PackedLinear | None:
        return None

    def run_gemms(self, x: Tensor) -> None:
        self.attention.run_gemms(x)
        self.recurrent.run_gemms(x)

    def __call__(self, x: Rows, layout: StepLayout, cache: LayerCache, kept: Tensor | None = None) -> Tensor:
        return self.attention(x, layout, cache, kept).add_(self.recurrent(x, layout, cache, kept))


def key_units_of(mixer: Mixer | None) -> tuple[float, ...]:
    """See `Attention.key_units`; empty for mixers without keys, and for latents."""
    attention = mixer.attention if isinstance(mixer, BothMixers) else mixer
    return attention.key_units if isinstance(attention, Attention) else ()
