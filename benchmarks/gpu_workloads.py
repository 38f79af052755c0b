"""The offline workloads of docs/performance.md.

Lengths and tokens are fixed by seed, the same for every measured engine. Weights are random: speed does not depend on
their values.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TOKEN_RANGE = (1000, 100_000)


@dataclass(frozen=True)
class Task:
    prompt: list[int]
    num_tokens_out: int


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*TOKEN_RANGE) for _ in range(count)]


def _long_tailed(rng: random.Random, log_mean: float, sigma: float, min_len: int, max_len: int) -> int:
    return max(min_len, min(max_len, int(rng.lognormvariate(log_mean, sigma))))


def chat() -> list[Task]:
    """2,000 conversations: short, long-tailed prompts and answers."""
    rng = random.Random(0)
    tasks = []
    for _ in range(2000):
        prompt = _tokens(rng, _long_tailed(rng, 4.8, 1.1, 4, 2048))
        tasks.append(Task(prompt, _long_tailed(rng, 5.0, 0.9, 4, 1024)))
    return tasks


def prefill() -> list[Task]:
    """1,000 documents of 2,048 tokens, 64 out: classification, extraction."""
    rng = random.Random(1)
    return [Task(_tokens(rng, 2048), 64) for _ in range(1000)]


def decode() -> list[Task]:
    """1,000 prompts of 128 tokens, 1,024 out: synthetic data."""
    rng = random.Random(2)
    return [Task(_tokens(rng, 128), 1024) for _ in range(1000)]


def prefix() -> list[Task]:
    """2,000 requests over 32 system prompts of 1,536 tokens, in random order, with 128 more tokens each and 128 out."""
    rng = random.Random(3)
    heads = [_tokens(rng, 1536) for _ in range(32)]
    return [Task(rng.choice(heads) + _tokens(rng, 128), 128) for _ in range(2000)]


WORKLOADS = {"chat": chat, "prefill": prefill, "decode": decode, "prefix": prefix}
