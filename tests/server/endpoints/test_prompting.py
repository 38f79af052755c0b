from __future__ import annotations

from typing import Any

import pytest

from headrace.server.endpoints.prompting import estimated_tokens
from tests.server.serving import Server

CHAT = [{"role": "user", "content": "x" * 88}]  # 103 characters: role, user, content and x


@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [
        (["x" * 40], 10),
        (["x" * 40, "x" * 20], 15),
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [4]], 4),
        ([CHAT], 103 // 4),
        ([[CHAT, None]], 103 // 4),
        (["x" * 4_000_000], 100),
        ([list(range(500)), "x" * 4_000_000, "x" * 40], 210),
    ],
)
def test_a_prompt_is_estimated_by_its_characters_or_ids_and_never_longer_than_the_context(
    prompts: list[Any], num_tokens: int
) -> None:
    assert estimated_tokens(prompts, 100) == num_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_only_the_prompt_is_counted(server: Server, path: str, body: dict[str, Any]) -> None:
    server.post(path, {**body, "max_tokens": 1, "allowed_token_ids": [5] * 1000, "metadata": {"note": "x" * 5000}})
    assert server.queue.reservations[-1].num_estimated < 10
