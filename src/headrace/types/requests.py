"""A request as the engine takes it, and the events that it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.types.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]
Pooling = Literal["last", "mean", "cls"]

# Requests with this priority or a higher number are background work, such as lines of batches: they use what other
# requests leave free (`sched/background.py`). Requests of HTTP clients have lower numbers.
BACKGROUND_PRIORITY = 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """What a request wants from its prompt instead of an answer: pooled hidden states (an embedding; vLLM's pooling) or
    log-probabilities of given tokens (a score). One of the two is set."""

    pooling: Pooling | None = None  # of the hidden states after the final norm: the last or first token's, or the mean
    targets: TokenIds | None = None  # tokens to score; the last one would follow the last prompt token
    second_start: int | None = None  # where the second text of a pair starts, for models with token types

    def first_position(self, prompt_len: int) -> int:
        """Position of the first token whose hidden state is needed; those before may come from the prefix cache."""
        if self.targets is not None:
            return prompt_len - len(self.targets)
        return prompt_len - 1 if self.pooling == "last" else 0

    def end_position(self, prompt_len: int) -> int:
        """Position after the last token whose hidden state is needed."""
        return 1 if self.pooling == "cls" else prompt_len


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request as the engine takes it: tokens, not text. A Struct, since a job makes millions."""

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: str | None = None  # prompts share cached blocks only under the same salt
    watched: bool = False  # deliver tokens each step, not once at the end
    announced: bool = False  # deliver the first token at once, even if not watched
    readout: Readout | None = None  # if set, nothing is sampled and `params` is not used
    seed: int | None = None  # used if `params` has none: many requests may share `params`
    shares_blocks: bool = False  # with other such requests of its salt, even without prefix caching

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND_PRIORITY

    def __post_init__(self) -> None:
        # The prefix cache compares the bytes of token ids, so they have one type.
        ids = np.ascontiguousarray(self.prompt_token_ids, np.int32)
        if ids is not self.prompt_token_ids:
            msgspec.structs.force_setattr(self, "prompt_token_ids", ids)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log-probability and rank of one token, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


PromptLogprobs = tuple[TokenLogprobs | None, ...]  # of each token of a prompt; None for the first


class SequenceTiming(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The times of a sequence, on the clock that all processes of a machine share (`time.monotonic`)."""

    started_at: float | None = None  # when it first got a slot
    first_token_at: float | None = None
    last_token_at: float | None = None  # known at its end
    num_preemptions: int = 0  # how often it lost its slot


class SequenceEvent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event of one sequence: the tokens since the last event, and the finish reason if it ended.

    There is one for each watched sequence and step, so it is a Struct, which is far cheaper to make and to send.
    """

    request_id: str
    index: int  # which of the request's `n` sequences
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it; it is the last of its tokens
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first event after the whole prompt is computed
    readout: npt.NDArray[np.float64] | None = None  # at the end: the pooled state [H], or a value for each target
    timing: SequenceTiming | None = None  # with the first event of a sequence and with its last
