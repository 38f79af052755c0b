from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.endpoints.prompting import estimated_tokens
from headrace.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Server, serving

HUGE = (
    "word " * 3_000_000
)  # 15 MB; the context has 512 tokens, and a chat template writes at most 16 million characters
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
        (["x" * 1_600], 100),
        ([list(range(500)), "x" * 1_000, "x" * 40], 210),
        (["x" * 1_601], 0),
        ([[{"role": "user", "content": "x" * 900}, {"role": "user", "content": "x" * 900}]], 0),
        ([list(range(500)), "x" * 4_000_000, "x" * 40], 110),
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


@pytest.fixture(scope="module")
def roomy(tiny_directory: Path) -> Iterator[Server]:
    """A server that takes bodies of many megabytes."""
    with serving(start=FakeEngine(tiny_directory), options=ServerOptions(max_body_bytes=2**26)) as running:
        yield running


@pytest.fixture
def num_characters(roomy: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that the server's tokenizer gets. No text is tokenized whole: it gives 2,000 tokens."""
    found: list[int] = []

    def encode_batch(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        found.extend(map(len, texts))
        return [[1] * 2_000 for _ in texts]

    monkeypatch.setattr(roomy.services.engine.tokenizer, "encode_batch", encode_batch)
    return found


BODIES = {
    "/v1/completions": ("prompt", {"prompt": HUGE * 2}),
    "/v1/chat/completions": ("messages", {"messages": [{"role": "user", "content": HUGE}]}),
    "/v1/responses": ("input", {"input": HUGE}),
}


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_of_many_megabytes_is_refused_by_its_start(
    roomy: Server, num_characters: list[int], path: str
) -> None:
    param, body = BODIES[path]
    error = roomy.error(path, body)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your prompt has ")
    assert num_characters == [8 * 512]
    assert roomy.queue.num_open == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_to_be_truncated_is_tokenized_whole(roomy: Server, num_characters: list[int], path: str) -> None:
    _, body = BODIES[path]
    error = roomy.error(path, body | {"truncate_prompt_tokens": 500, "max_tokens": 100})
    assert error["param"] == "max_tokens"  # 500 tokens are left of the prompt
    assert [number >= len(HUGE) for number in num_characters] == [True]


def test_tokenize_has_no_limit(roomy: Server, num_characters: list[int]) -> None:
    assert roomy.post("/tokenize", {"prompt": HUGE}).json()["count"] == 2_000
    assert num_characters == [len(HUGE)]
