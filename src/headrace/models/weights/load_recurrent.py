"""Loads mixers with a recurrent state."""

from __future__ import annotations

from torch import Tensor

from headrace.models.gated_delta import GatedDelta
from headrace.models.mamba2 import Mamba2
from headrace.models.mixer import Mixer
from headrace.models.recurrent_specs import GatedDeltaSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from headrace.models.short_conv import ShortConv
from headrace.models.weights.reader import WeightReader


def recurrent_mixer(reader: WeightReader, spec: RecurrentSpec, prefix: str, *, eps: float) -> Mixer:
    if isinstance(spec, ShortConvSpec):
        return _short_conv(reader, spec, prefix)
    if isinstance(spec, Mamba2Spec):
        return _mamba2(reader, spec, prefix, eps)
    return _gated_delta(reader, spec, prefix, eps)


def _short_conv(reader: WeightReader, spec: ShortConvSpec, prefix: str) -> ShortConv:
    return ShortConv(
        projection=reader.linear(prefix + "in_proj", has_bias=spec.has_bias),
        weight=_conv_weight(reader, prefix),
        bias=reader.tensor(prefix + "conv1d.bias") if spec.has_bias else None,
        output=reader.linear(prefix + "out_proj", has_bias=spec.has_bias),
    )


def _mamba2(reader: WeightReader, spec: Mamba2Spec, prefix: str, eps: float) -> Mamba2:
    parts = ("gate_proj", "x_proj", "b_proj", "c_proj", "dt_proj")
    return Mamba2(
        spec=spec,
        projection=reader.linear(*(prefix + part for part in parts), has_bias=spec.has_bias),
        conv_weight=_conv_weight(reader, prefix),
        conv_bias=reader.tensor(prefix + "conv1d.bias") if spec.has_conv_bias else None,
        rate=_rate(reader, prefix),
        skip=reader.float32(prefix + "D.bias"),
        dt_bias=reader.float32(prefix + "dt_bias.bias"),
        norm=None if spec.norm == "none" else reader.float32(prefix + "norm.weight"),
        eps=eps,
        output=reader.linear(prefix + "out_proj", has_bias=spec.has_output_bias),
    )


def _gated_delta(reader: WeightReader, spec: GatedDeltaSpec, prefix: str, eps: float) -> GatedDelta:
    parts = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
    return GatedDelta(
        spec=spec,
        projection=reader.linear(*(prefix + part for part in parts), has_bias=False),
        conv_weight=_conv_weight(reader, prefix),
        rate=_rate(reader, prefix),
        dt_bias=reader.float32(prefix + "dt_bias.bias"),
        norm=reader.float32(prefix + "norm.weight"),
        eps=eps,
        output=reader.linear(prefix + "out_proj", has_bias=False),
    )


def _conv_weight(reader: WeightReader, prefix: str) -> Tensor:  # [C, K]
    return reader.tensor(prefix + "conv1d.weight").squeeze(1)


def _rate(reader: WeightReader, prefix: str) -> Tensor:  # [heads]
    return -reader.float32(prefix + "A_log.bias").exp()
