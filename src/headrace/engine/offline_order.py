"""The order in which offline requests start, and how many sequences run at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

from headrace.engine.prompts import Prompt, prefix
from headrace.engine.settings import Settings
from headrace.types import SamplingParams


def starting_order(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[int]:
    """The order in which to start requests: the largest `max_tokens` first, so that no long answer is left running
    alone; among equals, prompts that share a prefix side by side, so that it is computed and kept once."""
    limits = [math.inf if each.max_tokens is None else each.max_tokens for each in params]
    try:
        return sorted(range(len(params)), key=lambda index: (-limits[index], *prefix(prompts[index])))
    except (TypeError, ValueError):  # an invalid prompt cannot be compared; parsing it later raises the error
        return sorted(range(len(params)), key=lambda index: -limits[index])


def prefixes_first(prompts: Sequence[Prompt]) -> list[int]:
    """The order in which to compute prompts: those that share a prefix side by side."""
    return starting_order(prompts, [SamplingParams()] * len(prompts))


def longest_first(prompts: Sequence[Prompt]) -> list[int]:
    """The order for an encoder, which shares no prefixes: texts of one length meet in a step."""
    lens = [_len(prompt) for prompt in prompts]
    return sorted(range(len(prompts)), key=lambda index: -lens[index])


def _len(prompt: Prompt) -> int:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids") or ()
    return len(prompt) if isinstance(prompt, Sized) else 0  # an invalid prompt is refused when it is read


def target_concurrency(params: Sequence[SamplingParams], settings: Settings) -> int | None:
    """How many sequences to run at once, if their answers reach their limits."""
    limits = [
        min(each.max_tokens or settings.max_model_len, settings.max_model_len)
        for each in params
        for _ in range(each.num_sequences)
    ]
    return target_concurrency_of(sum(limits), max(limits, default=0), settings)


def target_concurrency_of(num_tokens: int, longest: int, settings: Settings) -> int | None:
    """How many sequences to run at once so that answers of `num_tokens` in total take as long as the longest of them,
    and no slot is idle before.

    With more, the short answers would finish earlier and leave the long ones to decode in small, wasteful steps.
    """
    if not longest or settings.full_rate_seqs is None:
        return None
    return max(settings.full_rate_seqs, math.ceil(num_tokens / longest))
