"""What a pooling model is asked and what it returns, with vLLM's names: parameters and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.arguments import refuses_unknown
from headrace.errors import RequestError
from headrace.models.pooler import OutputActivation, PoolerSpec

Values = npt.NDArray[np.float32]


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class PoolingParams:
    truncate_prompt_tokens: int | None = None  # keep so many tokens from the start; -1: as many as the model takes
    dimensions: int | None = None  # of an embedding, for models that allow fewer
    use_activation: bool | None = None  # normalize an embedding, or make probabilities of a classifier's outputs
    task: str | None = None  # embed or classify; None: the model's

    def __post_init__(self) -> None:
        for name in ("truncate_prompt_tokens", "dimensions"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
        check_truncation(self.truncate_prompt_tokens)
        if not isinstance(self.use_activation, (bool, type(None))):
            raise RequestError(
                f"use_activation must be True or False, got {self.use_activation!r}", param="use_activation"
            )

    @classmethod
    def of(cls, given: object) -> PoolingParams:
        if given is None:
            return cls()
        if not isinstance(given, cls):
            raise RequestError(f"pooling_params must be PoolingParams, got {given!r}", param="pooling_params")
        return given


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    data: Values


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput:
    """A prompt with its embedding, or with the outputs of a classifier."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: tuple[int, ...]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]
    label: str  # of the largest

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: tuple[int, ...]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float  # how relevant the second text is for the first


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts with its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: tuple[int, ...]
    finished: bool = True
    num_cached_tokens: int = 0


def check_truncation(limit: int | None) -> None:
    if limit is not None and limit < 1 and limit != -1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes, got {limit}",
            param="truncate_prompt_tokens",
        )


def check_task(pooler: PoolerSpec | None, task: str) -> None:
    """Refuse what the model cannot do. A model that generates (no pooler) also gives embeddings: its hidden states."""
    own = "embed" if pooler is None else pooler.task
    if task == own:
        return
    if task not in ("embed", "classify"):
        raise RequestError(f"task must be embed or classify, got {task!r}", param="task", code="unsupported_parameter")
    kind = "generates text" if pooler is None else "is a classifier" if own == "classify" else "gives embeddings"
    raise RequestError(
        f"this model does not support {task}: it {kind}; use {_way_out(pooler)}",
        param="model",
        code="unsupported_model",
    )


def check_scoring(pooler: PoolerSpec | None) -> None:
    """Refuse scores of pairs from a model that cannot give them."""
    if pooler is None:
        raise RequestError(
            "this model does not support scoring: it generates text; use a reranker or an embedding model, or start "
            "this one with runner='pooling' to score by the similarity of its embeddings",
            param="model",
            code="unsupported_model",
        )
    if pooler.task == "classify" and not pooler.is_cross_encoder:
        raise RequestError(
            f"this model does not support scoring: it is a classifier of {pooler.num_labels} labels, and a score needs "
            "one; use classify",
            param="model",
            code="unsupported_model",
        )


def _way_out(pooler: PoolerSpec | None) -> str:
    if pooler is None:
        return "a model with a classification head"
    return "classify or score" if pooler.task == "classify" else "embed or score, or a classifier"


def check_dimensions(pooler: PoolerSpec | None, dimensions: int | None) -> None:
    if dimensions is None:
        return
    if pooler is None or not pooler.is_matryoshka:
        problem = (
            "this model does not support matryoshka representation: fewer dimensions than its own give poor "
            'results; leave it out, or start with hf_overrides={"is_matryoshka": true} if the model was trained for it'
        )
    elif pooler.matryoshka_dimensions and dimensions not in pooler.matryoshka_dimensions:
        allowed = ", ".join(map(str, pooler.matryoshka_dimensions))
        problem = f"this model supports {allowed} dimensions, got {dimensions}"
    elif not 1 <= dimensions <= pooler.size:
        problem = f"must be between 1 and {pooler.size:,}, got {dimensions}"
    else:
        return
    raise RequestError(f"dimensions: {problem}", param="dimensions", code="unsupported_parameter")


def as_embedding(values: npt.NDArray[Any], *, normalize: bool, dimensions: int | None = None) -> Values:
    """Cuts and normalizes a pooled state."""
    kept = values[:dimensions]
    length = float(np.linalg.norm(kept)) if normalize else 1.0
    return (kept / max(length, 1e-12)).astype(np.float32)


def activated(values: npt.NDArray[Any], activation: OutputActivation) -> npt.NDArray[np.float64]:
    """Makes probabilities of a classifier's outputs."""
    wide = values.astype(np.float64)
    if activation == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(wide, -700.0, 700.0))))
    if activation == "softmax":
        powers = np.exp(wide - wide.max())
        return np.asarray(powers / powers.sum())
    return wide


def pair_scores(values: list[npt.NDArray[Any]], num_first: int | None) -> list[float]:
    """The scores of pairs. `num_first` is None: one output of a cross-encoder for each pair. Else `values` are
    normalized embeddings, of `num_first` first texts (one, or one for each pair), then of the second texts."""
    if num_first is None:
        return [float(each[0]) for each in values]
    firsts, seconds = values[:num_first], values[num_first:]
    firsts = firsts * len(seconds) if num_first == 1 else firsts
    return [float(np.dot(a.astype(np.float64), b)) for a, b in zip(firsts, seconds, strict=True)]
