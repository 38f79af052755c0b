"""The requests of a workload, as every engine gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from headrace.bench.workloads.spec import WorkloadSpec


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request: a prompt (text or token ids) or messages, and the length of its answer.

    `output_len` is exact with ends="exact", otherwise the most that the answer may have.
    """

    output_len: int
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    num_prompt_tokens: int | None = None  # None: only the engine knows
    due_s: float | None = None  # arrival time of a trace, from its start
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None  # None: the engine's

    @property
    def is_chat(self) -> bool:
        return self.messages is not None


@dataclass(frozen=True)
class Workload:
    spec: WorkloadSpec
    requests: Sequence[BenchRequest]

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The spec, its hash and what it came to, for a record."""
        known = [request.num_prompt_tokens for request in self.requests if request.num_prompt_tokens is not None]
        return {
            **self.spec.as_json(),
            "hash": self.spec.hash,
            "num_requests": len(self.requests),
            "num_prompt_tokens": sum(known) if len(known) == len(self.requests) else None,
            "max_output_tokens": sum(request.output_len for request in self.requests),
            "longest_request": max((request.num_prompt_tokens or 0) + request.output_len for request in self.requests),
        }

    def first(self, num_requests: int) -> Workload:
        return replace(self, requests=self.requests[:num_requests])

    def sampling(self, request: BenchRequest) -> dict[str, Any]:
        """Sampling parameters of a request, under the names of OpenAI's API and vLLM's."""
        params: dict[str, Any] = {"max_tokens": request.output_len, "temperature": self.spec.temperature}
        if self.spec.ends == "exact":
            params |= {"min_tokens": request.output_len, "ignore_eos": True}
        for name in ("stop_token_ids", "allowed_token_ids", "seed"):
            if (value := getattr(request, name)) is not None:
                params[name] = value
        return params

    def with_seeds(self) -> Workload:
        """The same requests with a seed each, so that answers that end by themselves have equal lengths in each round,
        but for rounding."""
        seeded = [msgspec.structs.replace(request, seed=seed) for seed, request in enumerate(self.requests)]
        return replace(self, requests=seeded)

    def with_known_lengths(self, output_lens: Sequence[int]) -> Workload:
        """The same requests with answers of exactly these lengths, which engines know in advance."""
        requests = [
            msgspec.structs.replace(request, output_len=length, stop_token_ids=None)
            for request, length in zip(self.requests, output_lens, strict=True)
        ]
        return Workload(replace(self.spec, ends="exact"), requests)

    def body(self, index: int, model: str, *, stream: bool = True) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of a request over HTTP."""
        request = self.requests[index]
        body: dict[str, Any] = {"model": model, **self.sampling(request), "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if request.is_chat:
            return "/v1/chat/completions", body | {"messages": request.messages}
        return "/v1/completions", body | {"prompt": request.prompt}
