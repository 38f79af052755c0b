"""Readouts (vLLM's pooling): builds requests for embeddings and scores, and their outputs from the events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from headrace.engine.answers import Progress
from headrace.engine.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    activated,
    as_embedding,
    check_dimensions,
    check_task,
)
from headrace.engine.prompts import TokenizedPair, TokenizedPrompt
from headrace.errors import RequestError, nearest
from headrace.models.pooler import OutputActivation, PoolerSpec, PoolerTask
from headrace.models.spec import ModelSpec
from headrace.types import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    Pooling,
    Readout,
    Request,
    SamplingParams,
    ScoreOutput,
    ScoreRequestOutput,
    SequenceEvent,
)

_NO_PARAMS = SamplingParams(seed=0)  # nothing is sampled; a fixed seed avoids generating one


@dataclass(slots=True)
class PendingReadout:
    """One readout from submission to its last event. Owned by the code that submitted it."""

    request: Request
    prompt: str | None
    num_cached_tokens: int = 0
    error: str | None = None
    values: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    is_finished: bool = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` once it is complete, the reason under which vLLM counts it."""
        return "stop" if self.is_finished and self.error is None else None

    @property
    def lengths(self) -> list[int]:
        """Number of generated tokens: none, and no sequences."""
        return []

    def take(self, event: SequenceEvent) -> Progress:
        self.is_finished = event.finish_reason is not None
        self.num_cached_tokens = event.num_cached_tokens
        self.error = event.error
        if event.readout is not None:
            self.values = event.readout
        elif self.is_finished and self.error is None:
            self.error = "the request was aborted"
        return Progress(self.is_finished)

    def _check(self) -> None:
        if self.error is not None:
            raise RequestError(self.error)


@dataclass(slots=True)
class PendingEmbedding(PendingReadout):
    normalize: bool = True
    dimensions: int | None = None

    def pooled(self) -> npt.NDArray[np.float32]:
        self._check()
        return as_embedding(self.values, normalize=self.normalize, dimensions=self.dimensions)

    def output(self) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            outputs=EmbeddingOutput(self.pooled()),
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(slots=True)
class PendingClassification(PendingReadout):
    activation: OutputActivation = "none"
    labels: tuple[str, ...] = ()

    def pooled(self) -> npt.NDArray[np.float32]:
        """The outputs, one for each label."""
        self._check()
        return activated(self.values, self.activation).astype(np.float32)

    def output(self) -> ClassificationRequestOutput:
        probs = self.pooled()
        return ClassificationRequestOutput(
            request_id=self.request.request_id,
            outputs=ClassificationOutput(probs.tolist(), self.labels[int(probs.argmax())]),
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            num_cached_tokens=self.num_cached_tokens,
        )


PendingPooling: TypeAlias = PendingEmbedding | PendingClassification


@dataclass(slots=True)
class PendingScore(PendingReadout):
    num_context: int = 0  # tokens of the prompt; the request also holds the continuation without its last token

    def output(self) -> ScoreRequestOutput:
        self._check()
        assert self.request.readout is not None and self.request.readout.targets is not None
        return ScoreRequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids[: self.num_context].tolist()),
            outputs=ScoreOutput(tuple(self.request.readout.targets.tolist()), tuple(self.values.tolist())),
            num_cached_tokens=self.num_cached_tokens,
        )


def pooling_request(
    request_id: str,
    prompt: TokenizedPrompt,
    spec: ModelSpec,
    *,
    task: PoolerTask,
    pooling: Pooling | None = None,
    use_activation: bool | None = None,
    dimensions: int | None = None,
    **options: Any,
) -> PendingPooling:
    """`pooling` and `use_activation` replace the model's own: how it pools, and whether it normalizes an embedding or
    makes probabilities of a classifier's outputs."""
    check_task(spec.pooler, task)
    check_dimensions(spec.pooler, dimensions)
    readout = Readout(pooling=_pooling(spec, pooling), second_start=prompt.second_start)
    request = Request(request_id, prompt.token_ids, _NO_PARAMS, readout=readout, **options)
    return pending_pooling(request, prompt.text, spec.pooler, use_activation=use_activation, dimensions=dimensions)


def pending_pooling(
    request: Request,
    text: str | None,
    pooler: PoolerSpec | None,
    *,
    use_activation: bool | None = None,
    dimensions: int | None = None,
) -> PendingPooling:
    """What collects the event of a request that was built before."""
    if pooler is None or pooler.task == "embed":
        normalizes = True if pooler is None else pooler.normalize
        normalizes = normalizes if use_activation is None else use_activation
        return PendingEmbedding(request, text, normalize=normalizes, dimensions=dimensions)
    activation: OutputActivation = "none" if use_activation is False else pooler.activation
    return PendingClassification(request, text, activation=activation, labels=pooler.labels)


def _pooling(spec: ModelSpec, given: Pooling | None) -> Pooling:
    own: Pooling = "last" if spec.pooler is None else spec.pooler.pooling
    if given is None or given == own:
        return own
    known = get_args(Pooling) if spec.is_encoder else tuple(name for name in get_args(Pooling) if name != "cls")
    if given not in known:
        hint = nearest(str(given), known)
        raise RequestError(f"pooling must be one of {', '.join(known)}, got {given!r}{hint}", param="pooling")
    if spec.pooler is not None and spec.pooler.layers:
        raise RequestError(f"pooling must be {own!r}: layers after it were trained for that", param="pooling")
    return given


def score_request(request_id: str, pair: TokenizedPair, **options: Any) -> PendingScore:
    token_ids = np.concatenate([pair.context, pair.continuation[:-1]])
    request = Request(request_id, token_ids, _NO_PARAMS, readout=Readout(targets=pair.continuation), **options)
    return PendingScore(request, pair.text, num_context=len(pair.context))
