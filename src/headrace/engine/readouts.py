"""Readouts (vLLM's pooling): builds requests for embeddings and scores, and their outputs from the events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from headrace.engine.answers import Progress
from headrace.engine.prompts import TokenizedPair, TokenizedPrompt
from headrace.errors import RequestError, nearest
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

    def output(self) -> EmbeddingRequestOutput:
        self._check()
        length = float(np.linalg.norm(self.values)) if self.normalize else 1.0
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.request.prompt_token_ids.tolist()),
            outputs=EmbeddingOutput((self.values / max(length, 1e-12)).astype(np.float32)),
            num_cached_tokens=self.num_cached_tokens,
        )


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


def embedding_request(
    request_id: str, prompt: TokenizedPrompt, pooling: Pooling, *, normalize: bool, **options: Any
) -> PendingEmbedding:
    known = get_args(Pooling)
    if pooling not in known:
        hint = nearest(str(pooling), known)
        raise RequestError(f"pooling must be one of {', '.join(known)}, got {pooling!r}{hint}", param="pooling")
    request = Request(request_id, prompt.token_ids, _NO_PARAMS, readout=Readout(pooling=pooling), **options)
    return PendingEmbedding(request, prompt.text, normalize=normalize)


def score_request(request_id: str, pair: TokenizedPair, **options: Any) -> PendingScore:
    token_ids = np.concatenate([pair.context, pair.continuation[:-1]])
    request = Request(request_id, token_ids, _NO_PARAMS, readout=Readout(targets=pair.continuation), **options)
    return PendingScore(request, pair.text, num_context=len(pair.context))
