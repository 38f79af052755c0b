"""Greedy agreement of a config that changes numbers (FP8 weights or cache) with the default.

A rate, not equality: the shape of a batch alone can decide between two tokens of nearly equal probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.engines import Engine, RunningEngine
from headrace.bench.engines.http import ServerClient
from headrace.bench.values import found
from headrace.bench.workloads import BenchRequest, Workload

NUM_PROMPTS, MAX_TOKENS = 32, 64
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The share of tokens up to the first difference in each answer."""

    config: str
    agreement: float
    num_tokens: int
    num_prompts: int


def agreement_of(config: str, before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> Agreement:
    """Compare the tokens of the same prompts. After the first difference nothing is comparable."""
    equal = total = 0
    for first, second in zip(before, after, strict=True):
        total += max(len(first), len(second))
        pairs = zip(first, second, strict=False)
        equal += next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return Agreement(config, equal / total if total else 1.0, total, len(before))


def greedy_answers(engine: Engine, settings: Mapping[str, Any], workload: Workload) -> list[list[str]]:
    """The tokens of greedy answers to the first prompts, from a server that is started for it. Raises EngineFailure."""
    with engine.start(settings, serves=True) as running:
        assert running.address is not None
        client = ServerClient(running.address)
        return [_tokens(client, running, request) for request in workload.requests[:NUM_PROMPTS]]


def _tokens(client: ServerClient, running: RunningEngine, request: BenchRequest) -> list[str]:
    body: dict[str, Any] = {
        "model": running.model_name,
        "temperature": 0.0,
        "max_tokens": min(MAX_TOKENS, request.output_len),
    }
    if request.is_chat:
        path, body = "/v1/chat/completions", body | {"messages": request.messages, "logprobs": True}
        answer = _posted(client, path, body)
        return [str(each["token"]) for each in found(answer, "logprobs", "content") or []]
    answer = _posted(client, "/v1/completions", body | {"prompt": request.prompt, "logprobs": 1})
    return [str(token) for token in found(answer, "logprobs", "tokens") or []]


def _posted(client: ServerClient, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    told = client.post_json(path, body, timeout_s=TIMEOUT_S)
    return dict(told["choices"][0])
