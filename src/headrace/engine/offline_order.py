"""The order in which offline work starts, and how much of it runs at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.engine.prompts import Prompt, prefix
from headrace.engine.settings import Settings
from headrace.types import SamplingParams


def starting_order(prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[int]:
    """The order in which to start: answers that may become long first, so that none of them is left running alone;
    among equals, prompts that begin alike side by side, so that what they share is read and kept once."""
    limits = [math.inf if each.max_tokens is None else each.max_tokens for each in params]
    try:
        return sorted(range(len(params)), key=lambda index: (-limits[index], *prefix(prompts[index])))
    except (TypeError, ValueError):  # what is no prompt cannot be compared; reading it says what is wrong
        return sorted(range(len(params)), key=lambda index: -limits[index])


def prefixes_first(prompts: Sequence[Prompt]) -> list[int]:
    """The order in which to read prompts: those that begin alike side by side."""
    return starting_order(prompts, [SamplingParams()] * len(prompts))


def target_concurrency(params: Sequence[SamplingParams], settings: Settings) -> int | None:
    """How many sequences to run at once, if their answers become as long as they may."""
    limits = [
        min(each.max_tokens or settings.max_model_len, settings.max_model_len)
        for each in params
        for _ in range(each.num_sequences)
    ]
    return target_concurrency_of(sum(limits), max(limits, default=0), settings)


def target_concurrency_of(num_tokens: int, longest: int, settings: Settings) -> int | None:
    """How many sequences to run at once so that answers of so many tokens in all last as long as the longest of them
    and no row idles before.

    More would only finish the short answers earlier and leave the long ones to run in small, wasteful steps.
    """
    if not longest or settings.full_rate_seqs is None:
        return None
    return max(settings.full_rate_seqs, math.ceil(num_tokens / longest))
