"""The checks of a request that depend on the engine: context, cache, vocabulary, stop ids.

A request is checked once at each border:

    field                  checked by                                       when
    names, types           `openai/body.py`                                 an HTTP body or a batch line is read
    bounds of the API      `openai/sampling.py`                             the same
    values                 `SamplingParams.__post_init__`                   the parameters are made, by whatever front
    max_tokens + prompt    `openai/sampling.py`, `check_context`            before an HTTP request is queued
    grammar                `PromptReader.with_tokens` compiles it           before a request is submitted
    all of the engine's    `RequestChecks.check`                            `submit`, in the front's process
    cache blocks           `SchedulerLimits.check`                          once more in the scheduler: it guards memory

A process that receives a request trusts its sender (`SamplingParams.of_checked`, `EngineLoop.accept`): both are this
program. The bounds here are plain numbers, which an engine's process sends to its front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.errors import RequestError
from headrace.sched import SchedulerLimits
from headrace.types import NUM_DEVICE_STOPS, Request

NOT_GENERATIVE = (
    "this model is a pooling model: it returns embeddings, scores or classes and generates no text; use embed, score "
    "or classify (over HTTP /v1/embeddings, /rerank, /score or /classify), or another model"
)


@dataclass(frozen=True, slots=True)
class RequestChecks:
    limits: SchedulerLimits
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    generates: bool = True  # else it is a pooling model: prompts are embedded or classified
    takes_adapters: bool = False

    def check(self, request: Request) -> None:
        """Refuse a request that could never run."""
        if isinstance(request.priority, bool) or not isinstance(request.priority, (int, np.integer)):
            raise RequestError(f"priority must be an integer, got {request.priority!r}", param="priority")
        if not (request.cache_salt is None or isinstance(request.cache_salt, str)):
            raise RequestError(f"cache_salt must be text, got {request.cache_salt!r}", param="cache_salt")
        if not self.generates and (request.readout is None or request.readout.pooling is None):
            raise RequestError(NOT_GENERATIVE, param="model", code="unsupported_model")
        if request.adapter is not None and not self.takes_adapters:
            raise RequestError(
                f"the request names the adapter {request.adapter!r}; this engine takes none without enable_lora",
                param="model",
                code="model_not_found",
            )
        self.limits.check(request)
        assert not request.params.bad_words, "the front turns bad words into token ids"
        if self.vocab_size is not None:
            request.params.check_vocabulary(self.vocab_size)
        num_stops = len(self.stop_token_ids(request))
        if request.params.min_tokens and num_stops > NUM_DEVICE_STOPS:
            raise RequestError(
                f"min_tokens with {num_stops} stop token ids, end of sequence included: at most {NUM_DEVICE_STOPS} can "
                "be kept out of an answer; leave out min_tokens, or some of the ids",
                param="stop_token_ids",
            )

    def stop_token_ids(self, request: Request) -> tuple[int, ...]:
        """The request's stop tokens, and the model's end-of-sequence tokens unless it ignores them; each once."""
        eos = () if request.params.ignore_eos else self.eos_token_ids
        if not request.params.stop_token_ids:
            return eos
        return tuple(dict.fromkeys((*eos, *request.params.stop_token_ids)))
