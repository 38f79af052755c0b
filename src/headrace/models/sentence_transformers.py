"""Reads the files that sentence-transformers adds to a model directory: modules, prompts, the longest input.

    modules.json                        Transformer ─▶ Pooling ─▶ Dense ... ─▶ Normalize
    <folder>/config.json                of Pooling and Dense
    sentence_bert_config.json           max_seq_length, do_lower_case
    tokenizer_config.json               model_max_length, where max_seq_length is not stated
    config_sentence_transformers.json   prompts by name, and the default one; the activation of a cross-encoder

A cross-encoder that generates has Transformer -> LogitScore: its score is one token's logit against another's.

What would be computed differently is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.pooler import HeadActivation, HeadLayer
from headrace.types import Pooling

_POOLINGS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_MODES = {  # older configs have one switch for each
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_UNLIMITED = 10**9  # transformers writes larger numbers where there is no limit
ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class SentenceModules:
    pooling: Pooling
    layers: tuple[HeadLayer, ...]
    normalize: bool
    max_seq_len: int | None
    lowers_text: bool
    prompts: tuple[tuple[str, str], ...]
    default_prompt_name: str | None


def read_modules(directory: Path) -> SentenceModules | None:
    """Returns the modules of an embedding model; None: it has none, or they are those of a cross-encoder."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    modules = _modules(path)
    kinds = [kind for kind, _ in modules if kind != "Dropout"]
    if "Pooling" not in kinds:
        return None
    if kinds[:2] != ["Transformer", "Pooling"] or any(kind not in ("Dense", "Normalize") for kind in kinds[2:]):
        raise UnsupportedModelError(
            f"{path}: modules {' -> '.join(kinds)} are not supported, only Transformer -> Pooling -> Dense -> Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise UnsupportedModelError(f"{path}: Normalize is supported as the last module only")
    folders = {kind: directory / str(module.get("path", "")) for kind, module in modules}
    settings = _read_optional(directory / "sentence_bert_config.json")
    named = _read_optional(directory / "config_sentence_transformers.json")
    prompts = tuple((str(name), str(text)) for name, text in (named.get("prompts") or {}).items())
    return SentenceModules(
        pooling=_pooling(folders["Pooling"] / "config.json", has_prompts=any(text for _, text in prompts)),
        layers=tuple(_dense(directory, str(module["path"])) for kind, module in modules if kind == "Dense"),
        normalize=kinds[-1] == "Normalize",
        max_seq_len=settings.get("max_seq_length") or _longest_of_tokenizer(directory),
        lowers_text=bool(settings.get("do_lower_case")),
        prompts=prompts,
        default_prompt_name=named.get("default_prompt_name"),
    )


def read_score_tokens(directory: Path) -> tuple[int, int] | None:
    """Returns the tokens whose logits a cross-encoder compares, that for irrelevant first; None: it has none."""
    path = directory / "modules.json"
    modules = _modules(path) if path.is_file() else []
    if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
        return None
    config = _read(directory / str(modules[1][1]["path"]) / "config.json", dict)
    if config.get("false_token_id") is None:
        raise UnsupportedModelError(f"{path}: a LogitScore of one token is not supported, only one against another")
    return int(config["false_token_id"]), int(config["true_token_id"])


def read_activation(directory: Path) -> str | None:
    """Returns the activation of a cross-encoder's outputs, if its files name one."""
    named = _read_optional(directory / "config_sentence_transformers.json").get("activation_fn")
    return None if named is None else str(named)


def _modules(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Each module with its kind."""
    return [(str(module.get("type", "")).rpartition(".")[2], module) for module in _read(path, list)]


def _longest_of_tokenizer(directory: Path) -> int | None:
    stated = _read_optional(directory / "tokenizer_config.json").get("model_max_length")
    is_stated = isinstance(stated, int) and 0 < stated < _UNLIMITED
    return stated if is_stated else None


def _pooling(path: Path, *, has_prompts: bool) -> Pooling:
    config = _read(path, dict)
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else given
    if modes is None:
        modes = [name for key, name in _MODES.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{path}: pooling {' + '.join(map(str, modes)) or 'without a mode'} is not supported, only one of "
            f"{', '.join(_POOLINGS)}"
        )
    if config.get("include_prompt") is False and has_prompts:
        raise UnsupportedModelError(f"{path}: include_prompt=false is not supported: prompts count in the mean")
    return _POOLINGS[modes[0]]


def _dense(directory: Path, folder: str) -> HeadLayer:
    config = _read(directory / folder / "config.json", dict)
    if not (directory / folder / "model.safetensors").is_file():
        raise UnsupportedModelError(
            f"{directory / folder} has no model.safetensors; pickles are not read: save the model again with a recent "
            "sentence-transformers"
        )
    named = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if named not in ACTIVATIONS:
        raise UnsupportedModelError(f"{directory / folder}: activation_function {named!r} is not supported")
    return HeadLayer(
        int(config["in_features"]),
        int(config["out_features"]),
        has_bias=bool(config.get("bias", True)),
        activation=ACTIVATIONS[named],
        folder=folder,
    )


def _read_optional(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _read(path, dict) if path.is_file() else {}
    return found


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise ModelError(f"{path} must hold a JSON {kind.__name__}, found {type(content).__name__}")
    return content
