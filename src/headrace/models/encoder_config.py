"""config.json of an encoder to its spec, and the table of the encoders. What would be computed wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.family import Config
from headrace.models.hub_config import positive, read_dtype, read_rope, refuse_quantized, refuse_unread
from headrace.models.pooler import HeadActivation, HeadLayer
from headrace.models.spec import Activation, RopeSpec
from headrace.models.stored_tensors import Stored
from headrace.types import Pooling

_BERT_LAYERS = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_BERT_EMBEDDINGS = {
    "model.embed_tokens": "model.embeddings.word_embeddings",
    "model.embed_positions": "model.embeddings.position_embeddings",
    "model.embed_types": "model.embeddings.token_type_embeddings",
    "model.embed_norm": "model.embeddings.LayerNorm",
}
_MODERNBERT_NAMES = {
    "model.embed_tokens": "model.embeddings.tok_embeddings",
    "model.embed_norm": "model.embeddings.norm",
    "model.norm": "model.final_norm",
    "self_attn.o_proj": "attn.Wo",
    "attention_norm": "attn_norm",
    "mlp.down_proj": "mlp.Wo",
    "head.0": "head.dense",
    "head.0.norm": "head.norm",
    "head.1": "classifier",
}
_MODERNBERT_FUSED: dict[str, tuple[str, ...]] = {
    "attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj"),
}
# Tensors beside those of an embedding model: BERT's pooler, heads of masked language models, old buffers.
_LEFTOVERS = r"((bert|roberta|model)\.)?(embeddings\.position_ids|pooler\..*|cls\..*|lm_head\..*|head\..*|decoder\..*)"
_HARMLESS = frozenset(
    {
        "num_attention_heads",
        "attention_probs_dropout_prob",
        "attention_dropout",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "layer_norm_eps",
        "pooler_num_attention_heads",  # of the training code of LaBSE and Chinese BERT
        "norm_eps",
    }
)
_MODERNBERT_READ = frozenset(
    {
        "attention_bias",
        "global_attn_every_n_layers",
        "global_rope_theta",
        "layer_types",
        "local_attention",
        "local_rope_theta",
        "mlp_bias",
        "norm_bias",
        "rope_parameters",
        "rope_scaling",
        "classifier_bias",
        "decoder_bias",  # of the masked language model
        "deterministic_flash_attn",
    }
)
_MODERNBERT_WINDOW = 128
_MODERNBERT_EVERY = 3
_MODERNBERT_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}


@dataclass(frozen=True)
class EncoderFamily:
    """One row of the table."""

    name: str  # as `model_type` in config.json
    models: str  # names that users know
    base: str  # architecture without a head; with other endings it has one
    build: Callable[[EncoderFamily, Config], EncoderSpec]
    head: Callable[[Config, int, int], tuple[HeadLayer, ...]]  # of a classifier, given hidden size and labels
    classifier_pooling: Callable[[Config], Pooling]
    stored: Stored
    heads: Mapping[str, str] = field(default_factory=dict)  # names of the classifier's tensors
    gguf_architectures: tuple[str, ...] = ("bert",)

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(f"{self.base}{ending}" for ending in ("Model", "ForMaskedLM", "ForSequenceClassification"))


def _bert(family: EncoderFamily, config: Config) -> EncoderSpec:
    _refuse(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    refuse_unread(config, _HARMLESS | {"position_embedding_type"}, where="config.json")
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    num_layers, num_positions = positive(config, "num_hidden_layers"), positive(config, "max_position_embeddings")
    offset = 0 if family.name == "bert" else int(config.get("pad_token_id", 1)) + 1
    return EncoderSpec(
        family=family.name,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(hidden_size, num_heads),
        max_model_len=num_positions - offset,
        norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        rope=RopeSpec(kind="none"),
        windows=(None,) * num_layers,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        is_gated=False,
        activation=_activation(config, "hidden_act"),
        num_positions=num_positions,
        position_offset=offset,
        num_types=int(config.get("type_vocab_size", 2)),
        dtype=read_dtype(config),
    )


def _modernbert(family: EncoderFamily, config: Config) -> EncoderSpec:
    refuse_unread(config, _HARMLESS | _MODERNBERT_READ, where="config.json")
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    num_layers = positive(config, "num_hidden_layers")
    every = config.get("global_attn_every_n_layers") or _MODERNBERT_EVERY
    kinds = config.get("layer_types") or [
        "sliding_attention" if index % every else "full_attention" for index in range(num_layers)
    ]
    reach = int(config.get("local_attention") or _MODERNBERT_WINDOW) // 2
    return EncoderSpec(
        family=family.name,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(hidden_size, num_heads),
        max_model_len=positive(config, "max_position_embeddings"),
        norm_eps=float(config.get("norm_eps", 1e-5)),
        rope=_modernbert_rope(config, "full_attention", "global_rope_theta"),
        local_rope=_modernbert_rope(config, "sliding_attention", "local_rope_theta"),
        windows=tuple(_reach(kind, reach) for kind in kinds),
        qkv_bias=bool(config.get("attention_bias")),
        output_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        layer_norm=True,
        norm_bias=bool(config.get("norm_bias")),
        is_gated=True,
        activation=_activation(config, "hidden_activation"),
        norms_after=False,
        dtype=read_dtype(config),
    )


def _reach(kind: str, reach: int) -> int | None:
    if kind not in _MODERNBERT_THETAS:
        raise UnsupportedModelError(f"layer type {kind!r} is not supported for modernbert")
    return reach if kind == "sliding_attention" else None


def _modernbert_rope(config: Config, kind: str, older_key: str) -> RopeSpec:
    by_kind = config.get("rope_parameters") or {}
    theta = config.get(older_key) or _MODERNBERT_THETAS[kind]
    return read_rope(
        {
            "rope_theta": theta,
            "rope_parameters": by_kind.get(kind),
            "rope_scaling": config.get("rope_scaling"),
            "max_position_embeddings": config.get("max_position_embeddings"),
        }
    )


def _bert_head(config: Config, hidden_size: int, num_labels: int) -> tuple[HeadLayer, ...]:
    """BERT's pooler and a classifier; RoBERTa's head has the same shape."""
    return (HeadLayer(hidden_size, hidden_size, activation="tanh"), HeadLayer(hidden_size, num_labels))


def _modernbert_head(config: Config, hidden_size: int, num_labels: int) -> tuple[HeadLayer, ...]:
    named = config.get("classifier_activation", "gelu")
    activations: dict[str, HeadActivation] = {"gelu": "gelu", "relu": "relu", "tanh": "tanh"}
    if named not in activations:
        raise UnsupportedModelError(f"classifier_activation {named!r} is not supported for modernbert")
    dense = HeadLayer(
        hidden_size,
        hidden_size,
        has_bias=bool(config.get("classifier_bias")),
        activation=activations[named],
        has_norm=True,
        has_norm_bias=bool(config.get("norm_bias")),
    )
    return (dense, HeadLayer(hidden_size, num_labels))


def _first_token(config: Config) -> Pooling:
    return "cls"


def _modernbert_pooling(config: Config) -> Pooling:
    named = config.get("classifier_pooling", "cls")
    if named not in ("cls", "mean"):
        raise ModelError(f"classifier_pooling must be cls or mean, got {named!r}; check the model's config")
    return "cls" if named == "cls" else "mean"


ENCODERS = (
    EncoderFamily(
        name="bert",
        models="BERT, BGE, E5, GTE, all-MiniLM and other embedding models and cross-encoders of BERT's kind",
        base="Bert",
        build=_bert,
        head=_bert_head,
        classifier_pooling=_first_token,
        stored=Stored(
            root="bert.", layers="encoder.layer", names=_BERT_LAYERS | _BERT_EMBEDDINGS, leftovers=_LEFTOVERS
        ),
        heads={"head.0": "model.pooler.dense", "head.1": "classifier"},
    ),
    *(
        EncoderFamily(
            name=name,
            models=models,
            base=base,
            build=_bert,
            head=_bert_head,
            classifier_pooling=_first_token,
            stored=Stored(
                root="roberta.", layers="encoder.layer", names=_BERT_LAYERS | _BERT_EMBEDDINGS, leftovers=_LEFTOVERS
            ),
            heads={"head.0": "classifier.dense", "head.1": "classifier.out_proj"},
        )
        for name, models, base in (
            ("xlm-roberta", "XLM-RoBERTa: BGE-M3, multilingual E5, bge-reranker", "XLMRoberta"),
            ("roberta", "RoBERTa", "Roberta"),
        )
    ),
    EncoderFamily(
        name="modernbert",
        models="ModernBERT: gte-modernbert and others",
        base="ModernBert",
        build=_modernbert,
        head=_modernbert_head,
        classifier_pooling=_modernbert_pooling,
        gguf_architectures=("modern-bert",),
        stored=Stored(names=_MODERNBERT_NAMES, fused=_MODERNBERT_FUSED, leftovers=_LEFTOVERS),
    ),
)


def encoder_of_config(config: Config) -> EncoderFamily | None:
    """Returns the row of an encoder; None: it is another kind of model."""
    known = {name: family for family in ENCODERS for name in family.architectures}
    names = config.get("architectures") or []
    if not names:
        return next((family for family in ENCODERS if family.name == config.get("model_type")), None)
    return next((known[name] for name in names if name in known), None)


def encoder_spec(family: EncoderFamily, config: Config) -> EncoderSpec:
    refuse_quantized(config)
    return family.build(family, config)


def stored_encoder(family: EncoderFamily, *, is_classifier: bool) -> Stored:
    """How the family's checkpoints store tensors, those of the classifier included."""
    if not is_classifier:
        return family.stored
    pattern = family.stored.leftovers.replace(r"|pooler\..*", "").replace(r"|head\..*", "")
    return replace(family.stored, names={**family.stored.names, **family.heads}, leftovers=pattern)


def _refuse(config: Config, **allowed: Any) -> None:
    for key, value in allowed.items():
        given = config.get(key)
        if given is not None and given != value:
            raise UnsupportedModelError(f"{key} {given!r} is not supported, only {value!r}")


def _activation(config: Config, key: str) -> Activation:
    named = config.get(key, "gelu")
    names: dict[str, Activation] = {
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    if named not in names:
        raise UnsupportedModelError(f"{key} {named!r} is not supported for encoders (supported: {', '.join(names)})")
    return names[named]


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(
            f"hidden_size {hidden_size} cannot be divided into {num_heads} heads; check the model's config"
        )
    return hidden_size // num_heads
