"""Options of vLLM's server: several names of the model, several keys, usage in every stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from tests.server.whole_server import LimitedEngine, Running, with_server

NAMES = ("tiny", "alias", "org/model")
KEYS = ("first", "second")


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), device="cpu", max_num_seqs=4, max_model_len=128))
    yield made
    asyncio.run(made.close())


def _with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_all_names_are_listed_and_accepted_and_the_first_is_in_answers(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        listed = (await made.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == list(NAMES)
        assert (await made.client.get("/v1/models/org%2Fmodel")).json()["id"] == "org/model"
        answers = [await made.complete(model=name) for name in NAMES]
        assert [answer.json()["model"] for answer in answers] == ["tiny"] * 3
        refused = await made.complete(model="other")
        assert refused.status_code == 404 and "'tiny' and 'alias' and 'org/model'" in refused.text

    with_server(engine, body, served_model_name=NAMES)


def test_each_of_several_keys_is_accepted(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        answers = [await made.complete(headers=_with_key(key)) for key in (*KEYS, "third")]
        assert [answer.status_code for answer in answers] == [200, 200, 401]

    with_server(engine, body, api_key=KEYS)


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_stream_ends_with_the_usage_if_the_server_says_so(
    engine: LimitedEngine, path: str, options: dict[str, Any] | None
) -> None:
    asked = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    field = "messages" if "chat" in path else "prompt"

    async def body(made: Running) -> None:
        sent = {field: asked[field], "max_tokens": 2, "stream": True, "stream_options": options}
        answer = await made.client.post(path, json=sent)
        *_, last, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert done == "[DONE]" and json.loads(last)["usage"]["completion_tokens"] == 2

    with_server(engine, body, enable_force_include_usage=True)
