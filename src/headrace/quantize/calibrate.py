"""Runs a model over text and records what its matrices are multiplied with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import Rows
from headrace.models.decoder import Decoder, Layer
from headrace.models.layers import Attention, Mlp
from headrace.models.sources import Progress
from headrace.quantize.evaluate import prefill

MAX_MOMENT_BYTES = 2 << 30


@dataclass(slots=True)
class Inputs:
    """What one GEMM was given so far."""

    largest: Tensor | None = None  # [K], largest absolute value of each channel
    moments: Tensor | None = None  # [K, K] float32, sum of x xT over all rows; only where asked for

    def add(self, x: Tensor, *, has_moments: bool) -> None:
        wide = x.float()
        largest = wide.abs().amax(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        if has_moments:
            moments = wide.t() @ wide
            self.moments = moments if self.moments is None else self.moments.add_(moments)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of a layer's matrices: of qkv, o, gate and up, and down."""

    qkv: Inputs
    output: Inputs
    up: Inputs
    down: Inputs

    def of(self, name: str) -> Inputs:
        """What the matrix of this name is multiplied with."""
        matrix = name.removesuffix("_proj.weight").rpartition(".")[2]
        return {"o": self.output, "gate": self.up, "up": self.up, "down": self.down}.get(matrix, self.qkv)


@dataclass(frozen=True, slots=True)
class _Observed:
    linear: ops.PackedLinear
    inputs: Inputs
    has_moments: bool

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        self.inputs.add(x, has_moments=self.has_moments)
        return self.linear(x)


def record_inputs(
    decoder: Decoder,
    windows: Tensor,
    progress: Progress = lambda done, total: None,
    *,
    layers: Collection[int] | None = None,
    has_moments: bool = False,
) -> dict[int, LayerInputs]:
    """Returns the inputs of these layers, or of all, by index, recorded on windows of text [windows, window_len]."""
    indexes = range(len(decoder.layers)) if layers is None else layers
    found = {index: LayerInputs(Inputs(), Inputs(), Inputs(), Inputs()) for index in indexes}
    observed = replace(
        decoder,
        layers=tuple(
            _observed(layer, found[index], has_moments) if index in found else layer
            for index, layer in enumerate(decoder.layers)
        ),
    )
    for index, window in enumerate(windows):
        with torch.inference_mode():
            prefill(observed, window.to(decoder.device))
        progress(index + 1, len(windows))
    return found


class Calibration:
    """Runs the model over text when the inputs of a layer are asked for: once for all layers, or if their moments would
    need more memory than MAX_MOMENT_BYTES, once for as many as that holds. Ask for the layers in order."""

    def __init__(self, decoder: Decoder, windows: Tensor, progress: Progress, *, has_moments: bool) -> None:
        self._decoder, self._windows, self._progress = decoder, windows, progress
        self._has_moments = has_moments
        self._found: dict[int, LayerInputs] = {}

    def inputs_of(self, layer: int) -> LayerInputs:
        if layer not in self._found:
            self._found.clear()  # before others are recorded
            end = min(layer + self._layers_per_pass, len(self._decoder.layers))
            layers = range(layer, end)
            self._found |= record_inputs(
                self._decoder, self._windows, self._progress_of(layer), layers=layers, has_moments=self._has_moments
            )
        return self._found[layer]

    @property
    def _layers_per_pass(self) -> int:
        if not self._has_moments:
            return len(self._decoder.layers)
        spec = self._decoder.spec
        num_bytes = 4 * (2 * spec.hidden_size**2 + spec.q_size**2 + spec.intermediate_size**2)
        return max(1, MAX_MOMENT_BYTES // num_bytes)

    def _progress_of(self, layer: int) -> Progress:
        """Of all passes, from the one that starts with this layer."""
        count = len(self._windows)
        num_passes = -(-len(self._decoder.layers) // self._layers_per_pass)
        before = layer // self._layers_per_pass * count
        return lambda done, total: self._progress(before + done, num_passes * count)


def _observed(layer: Layer, inputs: LayerInputs, has_moments: bool) -> Layer:
    mlp, attention = layer.mlp, layer.mixer
    assert isinstance(mlp, Mlp) and isinstance(attention, Attention)
    return replace(
        layer,
        mixer=replace(
            attention,
            qkv=_Observed(attention.qkv, inputs.qkv, has_moments),
            output=_Observed(attention.output, inputs.output, has_moments),
        ),
        mlp=replace(
            mlp, up=_Observed(mlp.up, inputs.up, has_moments), down=_Observed(mlp.down, inputs.down, has_moments)
        ),
    )
