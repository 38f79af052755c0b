"""Decides what a checkpoint is used for: generating text, embeddings or classification; and its pooler.

vLLM's settings: `runner` (generate or pooling), `convert` (embed or classify), `pooler_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import ConfigError, UnsupportedModelError, nearest
from headrace.models.encoder_config import EncoderFamily
from headrace.models.families import GENERATING
from headrace.models.family import Config
from headrace.models.pooler import HeadActivation, HeadLayer, OutputActivation, PoolerSpec, PoolerTask
from headrace.models.sentence_transformers import ACTIVATIONS, SentenceModules
from headrace.models.spec import ModelSpec
from headrace.types import Pooling

_CLASSIFIER = "ForSequenceClassification"
_POOLING_TYPES: dict[str, Pooling] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
_POOLER_KEYS = ("pooling_type", "seq_pooling_type", "normalize", "use_activation", "task")
_OUTPUTS: dict[HeadActivation, OutputActivation] = {"none": "none", "sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """The user's settings."""

    runner: str = "auto"
    convert: str = "auto"
    pooler_config: Mapping[str, Any] | None = None


AUTOMATIC = PoolingChoice()
FindToken = Callable[[str], int | None]  # the id of a token that is exactly this text


def choose_pooler(
    config: Config,
    spec: ModelSpec,
    choice: PoolingChoice,
    *,
    encoder: EncoderFamily | None = None,
    modules: SentenceModules | None = None,
    score_tokens: tuple[int, int] | None = None,
    activation: str | None = None,
    find_token: FindToken = lambda text: None,
) -> PoolerSpec | None:
    """Returns the pooler of the model; None: it generates. `score_tokens` and `activation` are those of a cross-encoder
    of sentence-transformers."""
    natural: PoolerTask | None = None if modules is None else "embed"
    natural = natural if score_tokens is None else "classify"
    task = _task(config, choice, is_encoder=spec.is_encoder, of_modules=natural)
    if task is None:
        if choice.pooler_config:
            raise ConfigError("pooler_config is for pooling models, and this one generates; add runner='pooling'")
        return None
    if task == "classify":
        tokens = score_tokens or _named_tokens(config, find_token)
        pooler = (
            _classifier(config, spec, encoder, activation)
            if tokens is None
            else _classifier_of_tokens(spec, tokens, _output_activation(config, 1, activation))
        )
    else:
        pooler = _embedder(config, spec, modules)
    pooler = _with_settings(pooler, choice.pooler_config or {})
    _check(pooler, spec)
    return pooler


def _task(
    config: Config, choice: PoolingChoice, *, is_encoder: bool, of_modules: PoolerTask | None
) -> PoolerTask | None:
    names = [str(name) for name in config.get("architectures") or []]
    is_classifier = any(name.endswith(_CLASSIFIER) for name in names)
    has_lm_head = not is_encoder and (not names or any(name in GENERATING for name in names))
    if choice.runner == "generate" and not has_lm_head:
        raise ConfigError(f"runner='generate': {' '.join(names)} does not generate text; leave runner out")
    if choice.runner == "generate":
        return None
    natural: PoolerTask | None = "classify" if is_classifier else "embed"
    if has_lm_head:
        natural = of_modules
    if choice.convert == "classify" and natural != "classify":
        raise ConfigError(
            "convert='classify' needs a model with a classification head: an architecture that ends in "
            f"{_CLASSIFIER}; hf_overrides can name one, with classifier_from_token for rerankers that answer yes or no"
        )
    if choice.convert == "embed" and natural == "classify":
        raise ConfigError("convert='embed': this model has a classification head; leave convert out")
    if choice.runner == "pooling" or choice.convert == "embed":
        return natural or "embed"
    return natural


def _embedder(config: Config, spec: ModelSpec, modules: SentenceModules | None) -> PoolerSpec:
    dimensions = tuple(int(size) for size in config.get("matryoshka_dimensions") or ())
    is_matryoshka = bool(config.get("is_matryoshka") or dimensions)
    if modules is None:
        # As sentence-transformers does for an encoder without modules; a decoder's last token has seen the others.
        pooling: Pooling = "mean" if spec.is_encoder else "last"
        return PoolerSpec(
            "embed", pooling, spec.hidden_size, is_matryoshka=is_matryoshka, matryoshka_dimensions=dimensions
        )
    return PoolerSpec(
        "embed",
        modules.pooling,
        modules.layers[-1].out_size if modules.layers else spec.hidden_size,
        modules.layers,
        normalize=modules.normalize,
        prompts=modules.prompts,
        default_prompt_name=modules.default_prompt_name,
        lowers_text=modules.lowers_text,
        is_matryoshka=is_matryoshka,
        matryoshka_dimensions=dimensions,
    )


def _classifier(config: Config, spec: ModelSpec, encoder: EncoderFamily | None, activation: str | None) -> PoolerSpec:
    labels = _labels(config)
    if encoder is not None:
        pooling, layers = encoder.classifier_pooling(config), encoder.head(config, spec.hidden_size, len(labels))
    else:
        pooling, layers = "last", (HeadLayer(spec.hidden_size, len(labels), has_bias=False),)
    is_qwen3 = spec.family == "qwen3" and len(labels) == 1
    return PoolerSpec(
        "classify",
        pooling,
        len(labels),
        layers,
        activation=_output_activation(config, len(labels), activation),
        labels=labels,
        template="qwen3_reranker" if is_qwen3 else None,
    )


def _named_tokens(config: Config, find_token: FindToken) -> tuple[int, int] | None:
    """The tokens of vLLM's `classifier_from_token`."""
    named = config.get("classifier_from_token")
    if not named:
        return None
    ids = [find_token(str(token)) for token in named]
    if len(ids) != 2 or ids[0] is None or ids[1] is None:
        raise ConfigError(
            f"classifier_from_token must be two tokens of the vocabulary, such as no and yes, got {named}"
        )
    return ids[0], ids[1]


def _classifier_of_tokens(spec: ModelSpec, tokens: tuple[int, int], activation: OutputActivation) -> PoolerSpec:
    """A reranker that answers with one of two tokens: the sigmoid of the difference of their logits is the share of the
    second one."""
    if spec.family != "qwen3":
        raise UnsupportedModelError(
            f"a reranker that answers with a token is supported for qwen3, whose template is known, not {spec.family}"
        )
    layer = HeadLayer(spec.hidden_size, 1, has_bias=False, from_tokens=tokens)
    return PoolerSpec(
        "classify", "last", 1, (layer,), activation=activation, labels=("relevant",), template="qwen3_reranker"
    )


def _labels(config: Config) -> tuple[str, ...]:
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    return tuple(f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2)))


def _output_activation(config: Config, num_labels: int, named: str | None) -> OutputActivation:
    """`named` by a file of sentence-transformers; earlier versions wrote it to config.json."""
    named = named or (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        found = ACTIVATIONS.get(str(named).rpartition(".")[2])
        if found not in _OUTPUTS:
            raise UnsupportedModelError(f"config.json: activation {named!r} of a cross-encoder is not supported")
        return _OUTPUTS[found]
    if config.get("problem_type") == "regression":
        return "none"
    is_single = num_labels == 1 or config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if is_single else "softmax"


def _with_settings(pooler: PoolerSpec, given: Mapping[str, Any]) -> PoolerSpec:
    for name in given:
        if name not in _POOLER_KEYS:
            hint = nearest(name, _POOLER_KEYS)
            raise ConfigError(f"pooler_config: {name!r} is not supported{hint} (supported: {', '.join(_POOLER_KEYS)})")
    if given.get("task") not in (None, pooler.task):
        raise ConfigError(
            f"pooler_config: task {given['task']!r} does not fit the model, whose task is {pooler.task!r}"
        )
    named = given.get("seq_pooling_type", given.get("pooling_type"))
    if named is not None:
        if str(named).upper() not in _POOLING_TYPES:
            raise ConfigError(f"pooler_config: pooling_type must be one of {', '.join(_POOLING_TYPES)}, got {named!r}")
        pooler = replace(pooler, pooling=_POOLING_TYPES[str(named).upper()])
    uses = given.get("use_activation", given.get("normalize"))
    if uses is None:
        return pooler
    if pooler.task == "embed":
        return replace(pooler, normalize=bool(uses))
    return pooler if uses else replace(pooler, activation="none")


def _check(pooler: PoolerSpec, spec: ModelSpec) -> None:
    if spec.is_encoder:
        return
    if pooler.pooling == "cls":
        raise UnsupportedModelError(
            "CLS pooling is not supported for a decoder: its first token sees no other; use LAST or MEAN"
        )
    if pooler.pooling == "mean" and pooler.layers:
        raise UnsupportedModelError("mean pooling with layers after it is not supported for a decoder, only LAST")
