"""Runs a model over text and records what its matrices are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import Rows
from headrace.models.decoder import Decoder, Layer
from headrace.models.layers import Attention, Mlp
from headrace.models.sources import Progress
from headrace.quantize.evaluate import prefill

MAX_SAMPLE_ROWS = 256


@dataclass(slots=True)
class Inputs:
    """What one GEMM was given so far."""

    largest: Tensor | None = None  # [K], largest absolute value of each channel
    samples: list[Tensor] = field(default_factory=list)  # some rows, spread over the windows

    def add(self, x: Tensor, num_rows: int) -> None:
        largest = x.abs().amax(0).float()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.samples.append(x[:: max(1, len(x) // num_rows)][:num_rows].clone())

    def sample(self) -> Tensor:  # [rows, K] float32
        return torch.cat(self.samples).float()


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of a layer's matrices: of qkv, o, gate and up, and down."""

    qkv: Inputs
    output: Inputs
    up: Inputs
    down: Inputs


@dataclass(frozen=True, slots=True)
class _Observed:
    linear: ops.PackedLinear
    inputs: Inputs
    num_rows: int  # to keep of each call

    @property
    def takes_fp8(self) -> bool:
        return False

    def __call__(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        self.inputs.add(x, self.num_rows)
        return self.linear(x)


def record_inputs(
    decoder: Decoder, windows: Tensor, progress: Progress = lambda done, total: None
) -> list[LayerInputs]:
    """Returns the inputs of each layer, recorded on windows of text [windows, window_len]."""
    num_rows = max(1, MAX_SAMPLE_ROWS // len(windows))
    found = [LayerInputs(Inputs(), Inputs(), Inputs(), Inputs()) for _ in decoder.layers]
    pairs = zip(decoder.layers, found, strict=True)
    observed = replace(decoder, layers=tuple(_observed(layer, inputs, num_rows) for layer, inputs in pairs))
    for index, window in enumerate(windows):
        with torch.inference_mode():
            prefill(observed, window.to(decoder.device))
        progress(index + 1, len(windows))
    return found


def _observed(layer: Layer, inputs: LayerInputs, num_rows: int) -> Layer:
    mlp, attention = layer.mlp, layer.mixer
    assert isinstance(mlp, Mlp) and isinstance(attention, Attention)
    return replace(
        layer,
        mixer=replace(
            attention,
            qkv=_Observed(attention.qkv, inputs.qkv, num_rows),
            output=_Observed(attention.output, inputs.output, num_rows),
        ),
        mlp=replace(mlp, up=_Observed(mlp.up, inputs.up, num_rows), down=_Observed(mlp.down, inputs.down, num_rows)),
    )
