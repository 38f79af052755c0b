"""GGUF metadata of an encoder to its spec and its pooler, translated into the names that config.json uses.

Files of BERT's relatives share one architecture; the kind of tokenizer tells them apart. Their tables of positions
start at the first position that is used. A BERT's classifier is refused: llama.cpp's converter leaves out its pooler.
llama.cpp applies the classifier to what the pooler would read, so its scores from such a file are not the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.encoder_config import ENCODERS, EncoderFamily, encoder_spec
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.family import Config
from headrace.models.hub_config import refuse_unread
from headrace.models.sentence_transformers import SentenceModules
from headrace.models.spec import Shape
from headrace.types import Pooling

Metadata = Mapping[str, Any]

_BERT, _MODERN_BERT = "bert", "modern-bert"
_BY_TOKENIZER = {"bert": "bert", "t5": "xlm-roberta", "gpt2": "roberta"}
_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_KNOWN = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_epsilon",
        "attention.causal",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scaling.type",
        "rope.dimension_count",
    }
)


@dataclass(frozen=True, slots=True)
class GgufEncoder:
    family: EncoderFamily
    spec: EncoderSpec
    config: Config  # what `choose_pooler` reads
    modules: SentenceModules | None


def read_encoder(metadata: Metadata, shapes: Mapping[str, Shape], *, dtype: str) -> GgufEncoder | None:
    """Returns the encoder that a GGUF file holds; None: it holds a decoder."""
    architecture = metadata.get("general.architecture")
    if architecture not in (_BERT, _MODERN_BERT):
        return None
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    refuse_unread(values, _KNOWN, where="the GGUF metadata")
    family = _family(metadata, architecture)
    config = _common(values, shapes) | (_modern_bert(values) if architecture == _MODERN_BERT else {"pad_token_id": -1})
    spec = replace(encoder_spec(family, config), dtype=dtype)
    if "cls.output.weight" not in shapes:
        return GgufEncoder(family, spec, {"architectures": [f"{family.base}Model"]}, _modules(values))
    return GgufEncoder(family, spec, _classifier(family, values, shapes), None)


def _family(metadata: Metadata, architecture: str) -> EncoderFamily:
    tokenizer = metadata.get("tokenizer.ggml.model")
    name = "modernbert" if architecture == _MODERN_BERT else _BY_TOKENIZER.get(str(tokenizer))
    if name is None:
        raise UnsupportedModelError(f"a GGUF file of a BERT with a tokenizer of kind {tokenizer!r} is not supported")
    return next(family for family in ENCODERS if family.name == name)


def _common(values: Metadata, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """An offset of positions is not needed: `pad_token_id` is such that the first row is that of position 0."""
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no tensor 'token_embd.weight'; it is incomplete")
    types = shapes.get("token_types.weight", ())
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": values.get("embedding_length"),
        "intermediate_size": values.get("feed_forward_length"),
        "num_hidden_layers": values.get("block_count"),
        "num_attention_heads": values.get("attention.head_count"),
        "max_position_embeddings": values.get("context_length"),
        "type_vocab_size": types[0] if len(types) > 1 else len(types),  # a lone row is stored as a vector
        "layer_norm_eps": values.get("attention.layer_norm_epsilon", 1e-12),
    }


def _modern_bert(values: Metadata) -> dict[str, Any]:
    return {
        "norm_eps": values.get("attention.layer_norm_epsilon", 1e-5),
        "local_attention": values.get("attention.sliding_window"),
        "global_attn_every_n_layers": values.get("attention.sliding_window_pattern"),
        "global_rope_theta": values.get("rope.freq_base"),
        "local_rope_theta": values.get("rope.freq_base_swa"),
        "hidden_activation": values.get("hidden_activation", "gelu"),
    }


def _classifier(family: EncoderFamily, values: Metadata, shapes: Mapping[str, Shape]) -> Config:
    """What config.json would say of the head. Files do not state how a ModernBERT pools and what its activation is:
    it is the mean, and GELU, as in llama.cpp."""
    if family.name == "bert":
        raise UnsupportedModelError(
            "a classifier of bert in a GGUF file is not supported: llama.cpp's converter leaves out its pooler, and "
            "scores would be wrong without it; use the model's safetensors"
        )
    needed = ("cls.weight", "cls.norm.weight") if family.name == "modernbert" else ("cls.weight",)
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise UnsupportedModelError(
            f"the GGUF file has a classifier of {family.name} without {missing[0]!r}, and scores would be wrong "
            "without it; use the model's safetensors"
        )
    return {
        "architectures": [f"{family.base}ForSequenceClassification"],
        "id2label": _labels(values, shapes),
        "classifier_pooling": "mean",
        "classifier_bias": "cls.bias" in shapes,
        "norm_bias": "cls.norm.bias" in shapes,
    }


def _labels(values: Metadata, shapes: Mapping[str, Shape]) -> dict[str, str]:
    shape = shapes["cls.output.weight"]
    num_labels = shape[0] if len(shape) > 1 else 1
    names = values.get("classifier.output_labels") or [f"LABEL_{index}" for index in range(num_labels)]
    if len(names) != num_labels:
        raise ModelError(f"the GGUF file names {len(names)} labels, but its classifier has {num_labels} outputs")
    return {str(index): str(name) for index, name in enumerate(names)}


def _modules(values: Metadata) -> SentenceModules | None:
    """What sentence-transformers' files would say. Files do not state that embeddings are normalized, as llama.cpp
    does by default."""
    kind = values.get("pooling_type")
    if kind is None:
        return None
    if kind not in _POOLINGS:
        raise UnsupportedModelError(f"pooling_type {kind} in a GGUF file is not supported, only mean, cls and last")
    return SentenceModules(
        pooling=_POOLINGS[kind],
        layers=(),
        normalize=True,
        max_seq_len=None,
        lowers_text=False,
        prompts=(),
        default_prompt_name=None,
    )
