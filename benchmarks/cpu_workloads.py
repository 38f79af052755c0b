"""Workloads of the CPU benchmark: chat prompts for the default model, lengths fixed by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

TOPICS = [
    "rivers",
    "the French revolution",
    "black holes",
    "bread",
    "chess",
    "the moon",
    "cats",
    "Rome",
    "steel",
    "music",
]


@dataclass(frozen=True)
class ChatTask:
    messages: list[dict[str, str]]
    num_tokens_out: int


def uniform(num_tasks: int = 128) -> list[ChatTask]:
    """Short questions, 64 tokens out each: the best case for a static batch."""
    return [
        ChatTask(
            [{"role": "user", "content": f"Write {2 + i % 5} sentences about {TOPICS[i % 10]} for reader number {i}."}],
            64,
        )
        for i in range(num_tasks)
    ]


def mixed(num_tasks: int = 256, seed: int = 7) -> list[ChatTask]:
    """The same questions with answers of 4 to 256 tokens, long-tailed as in real jobs."""
    rng = random.Random(seed)
    lengths = [max(4, min(256, int(rng.lognormvariate(3.6, 0.9)))) for _ in range(num_tasks)]
    return [ChatTask(task.messages, length) for task, length in zip(uniform(num_tasks), lengths, strict=True)]


WORKLOADS = {"uniform": uniform, "mixed": mixed}
