"""Loads what Gemma 3n has beside the layers of Gemma 3."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist
from typing import Any

from headrace.kernels import ops
from headrace.models.decoder import Decoder
from headrace.models.embeddings import DenseEmbeddings, ScaledEmbeddings
from headrace.models.gemma3n import AltUp, Gemma3nDecoder, LayerExtras
from headrace.models.layers import Norm
from headrace.models.spec import Gemma3nSpec
from headrace.models.weights.reader import WeightReader


def as_gemma3n(decoder: Decoder, reader: WeightReader, gemma3n: Gemma3nSpec) -> Gemma3nDecoder:
    """Returns the decoder with the rest of its weights. Embeddings of layers stay in the type of the weights."""
    table = DenseEmbeddings(reader.tensor("model.embed_tokens_per_layer.weight"))
    between = range(gemma3n.num_streams - 1)
    extras = tuple(_extras(decoder, reader, gemma3n, index) for index in range(decoder.spec.num_layers))
    further: dict[str, Any] = {
        "extras": extras,
        "input_embeddings": ScaledEmbeddings(table, math.sqrt(gemma3n.input_size)),
        "input_vocab_size": gemma3n.input_vocab_size,
        "input_projection": _linear(reader, "model.per_layer_model_projection"),
        "input_norm": _norm(decoder, reader, "model.per_layer_projection_norm"),
        "widen": tuple(_linear(reader, f"model.altup_projections.{i}") for i in between),
        "narrow": tuple(_linear(reader, f"model.altup_unembed_projections.{i}") for i in between),
    }
    common: dict[str, Any] = {field.name: getattr(decoder, field.name) for field in dataclasses.fields(Decoder)}
    return Gemma3nDecoder(**common, **further)


def _extras(decoder: Decoder, reader: WeightReader, gemma3n: Gemma3nSpec, index: int) -> LayerExtras:
    prefix, share = f"model.layers.{index}.", gemma3n.sparsities[index]
    scale = reader.tensor(prefix + "altup.correct_output_scale.bias")
    return LayerExtras(
        altup=AltUp(
            router_norm=_norm(decoder, reader, prefix + "altup.router_norm"),
            router=reader.float32(prefix + "altup.modality_router.weight"),
            predictions=reader.float32(prefix + "altup.prediction_coefs.weight"),
            corrections=reader.float32(prefix + "altup.correction_coefs.weight"),
        ),
        corrected_scale=scale if gemma3n.scales_corrected else None,
        low_rank_down=_linear(reader, prefix + "laurel.linear_left"),
        low_rank_up=_linear(reader, prefix + "laurel.linear_right"),
        low_rank_norm=_norm(decoder, reader, prefix + "laurel.post_laurel_norm"),
        input_gate=_linear(reader, prefix + "per_layer_input_gate"),
        input_up=_linear(reader, prefix + "per_layer_projection"),
        input_norm=_norm(decoder, reader, prefix + "post_per_layer_input_norm"),
        sparsity=NormalDist().inv_cdf(share) if share > 0 else None,
        kv_source=decoder.spec.kv_source(index),
    )


def _linear(reader: WeightReader, name: str) -> ops.PackedLinear:
    """Returns a small matrix, which `quantization` leaves as it is."""
    return ops.pack_linear(reader.tensor(f"{name}.weight"))


def _norm(decoder: Decoder, reader: WeightReader, name: str) -> Norm:
    return Norm(reader.float32(f"{name}.weight"), None, decoder.spec.norm_eps)
