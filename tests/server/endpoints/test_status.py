"""Models, tokenizer and status routes."""

from __future__ import annotations

import openai
import pytest

from headrace.server.endpoints import ROUTES
from headrace.version import __version__
from tests.server.serving import MODEL, Server


def test_the_model_is_listed_and_shown(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    assert server.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 512


def test_text_is_tokenized_and_detokenized(server: Server) -> None:
    answer = server.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 3
    assert answer["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}


def test_a_conversation_is_tokenized_as_the_model_sees_it(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<user>hi\n<assistant>"
    open_end = server.post("/tokenize", body | {"add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(open_end)] == open_end and len(open_end) < len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
def test_bad_texts_are_refused(server: Server, path: str, body: dict[str, object], param: str) -> None:
    assert server.error(path, body)["param"] == param


def test_tokenizer_info_has_special_tokens_and_the_template(server: Server) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and info["eos_token_id"] == 0 and "messages" in info["chat_template"]


def test_health_follows_the_engine_and_readiness_the_phase(server: Server) -> None:
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    server.state.is_alive = server.state.is_ready = False
    try:
        assert server.get("/health").status_code == server.get("/ready").status_code == 503
        assert server.get("/ready").json()["error"]["code"] == "draining"
    finally:
        server.state.is_alive = server.state.is_ready = True


def test_version_load_and_metrics(server: Server) -> None:
    assert server.get("/version").json() == {"version": __version__}
    assert server.get("/load").json() == {"server_load": 0}
    metrics = server.get("/metrics")
    assert metrics.text == "headrace:up 1\n" and metrics.headers["content-type"].startswith("text/plain")


def test_answers_are_counted_by_route_and_not_by_path(server: Server) -> None:
    server.metrics.statuses.clear()
    for path in ("/version", "/v1/models", "/nowhere/secret", "/version"):  # the last is only waited for
        server.get(path)
    assert server.metrics.statuses[:3] == [
        ("/version", "GET", 200),
        ("/v1/models", "GET", 200),
        ("another route", "GET", 404),
    ]


def test_the_document_describes_every_route_and_nothing_else(server: Server) -> None:
    document = server.get("/openapi.json").json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.path, route.method) for route in ROUTES if route.auth != "admin"}  # there is no key
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "top_k", "stream_options", "max_completion_tokens"} <= fields.keys()
    for path, methods in document["paths"].items():
        assert all(operation["summary"] for operation in methods.values()), path


def test_head_is_answered_as_get_without_the_body(server: Server) -> None:
    answer = server.http.head(server.url + "/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str(len(server.get("/health").content))
    assert server.http.head(server.url + "/v1/completions").status_code == 405
