"""The default model behind the API, for tests where the text matters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.serving import MODEL, Server, serving

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def embedded() -> Iterator[Server]:
    with serving("smollm2", max_num_seqs=4, max_model_len=1024) as running:
        yield running


@pytest.fixture
def client_of_embedded(embedded: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedded.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_question_is_answered_by_every_endpoint(client_of_embedded: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = client_of_embedded.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=64)
    assert "Paris" in (answer.choices[0].message.content or "") and answer.choices[0].finish_reason == "stop"
    chunks = client_of_embedded.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=64, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content
    response = client_of_embedded.responses.create(model=MODEL, input=messages, temperature=0, max_output_tokens=64)
    assert response.output_text == streamed and response.status == "completed"


def test_the_right_continuation_is_the_likelier_one(embedded: Server) -> None:
    def score(continuation: str) -> float:
        body = {"prompt": "The capital of France is" + continuation, "echo": True, "logprobs": 1, "max_tokens": 0}
        (choice,) = embedded.post("/v1/completions", body).json()["choices"]
        assert choice["text"] == body["prompt"] == "".join(choice["logprobs"]["tokens"])
        return float(choice["logprobs"]["token_logprobs"][-1])

    assert score(" Paris") > score(" Oslo")


def test_a_schema_gives_json_with_its_keys(client_of_embedded: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    messages: list[Any] = [{"role": "user", "content": "Give the capital of France and its country as JSON."}]
    answer = client_of_embedded.chat.completions.create(
        model=MODEL, messages=messages, response_format=form, temperature=0, max_tokens=64
    )
    assert json.loads(answer.choices[0].message.content or "").keys() == {"city", "country"}
