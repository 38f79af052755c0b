"""What a user of the Python API gets back: a prompt with its answers, its embedding or its score."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.types.requests import FinishReason, PromptLogprobs, TokenIds, TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` answers so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A request with its answers so far."""

    request_id: str
    prompt: str | None
    prompt_array: TokenIds = field(repr=False, compare=False)  # `prompt_token_ids` is made from it on first use
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why the engine gave up on it, if it did
    prompt_logprobs: PromptLogprobs | None = None  # if the request asked for them, once its prompt is computed

    @functools.cached_property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt_array.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    embedding: npt.NDArray[np.float32]  # [H]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRequestOutput:
    """A prompt with its embedding."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0

    @property
    def embedding(self) -> npt.NDArray[np.float32]:
        return self.outputs.embedding


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """A continuation's tokens, and the log-probability (natural logarithm) of each given all tokens before it."""

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation: the sum over its tokens."""
        return math.fsum(self.token_logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScoreRequestOutput:
    """A prompt with the score of one continuation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: ScoreOutput
    finished: bool = True
    num_cached_tokens: int = 0
