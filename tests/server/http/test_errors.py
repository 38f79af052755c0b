"""Every refusal has a status, OpenAI's shape, and the name of the invalid parameter."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from headrace.server.options import ServerOptions
from tests.server.serving import MODEL, Server, serving

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 3}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**30}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"min_tokens": 99, "max_tokens": 3}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": list(range(40)), "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"stream": "yes"}, "stream"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1}, "priority"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"guided_json": {}}, "guided_json"),
        ({"suffix": "end"}, "suffix"),
        ({"tempature": 1}, "tempature"),
        ({"model": 3}, "model"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_invalid_parameter_is_named(server: Server, path: str, more: dict[str, Any], param: str) -> None:
    error = server.error(path, BODIES[path] | more)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.partition("[")[0].partition(".")[0] in error["message"].replace(" ", "_")


def test_a_misspelt_parameter_is_refused_with_the_nearest_known_one(server: Server) -> None:
    error = server.error(CHAT, BODIES[CHAT] | {"max_token": 3})
    assert error["code"] == "unknown_parameter" and "'max_tokens'" in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "suffix": None, "detokenize": True, "stream_options": None, "logit_bias": None},
        {"n": None, "temperature": None, "stop": None, "seed": None, "stream": None, "top_k": -1},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_labels_nulls_and_values_without_effect_are_accepted(server: Server, path: str, more: dict[str, Any]) -> None:
    assert server.post(path, BODIES[path] | more | {"max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": 3}, "logprobs"),
        ({"messages": MESSAGES, "functions": [{}]}, "functions"),
        ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
        ({"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_an_invalid_conversation_is_refused(server: Server, body: dict[str, Any], param: str) -> None:
    assert server.error(CHAT, body)["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], [1, "a"], ["a", 1], [[1], "a"], [[1.5]], [True], {"a": 1}, 3, [-1], [10**6], [[10**20]], ""],
)
def test_an_invalid_prompt_is_refused(server: Server, prompt: Any) -> None:
    assert server.error(TEXT, {"prompt": prompt})["param"].startswith("prompt")


def test_too_many_prompts_or_answers_are_refused_before_any_work(server: Server) -> None:
    assert server.error(TEXT, {"prompt": ["a"] * 1025})["param"] == "prompt"
    assert server.error(TEXT, {"prompt": ["a"] * 1000, "n": 10})["param"] == "n"


def test_a_request_that_exceeds_the_context_is_refused_with_the_numbers(server: Server) -> None:
    error = server.error(TEXT, {"prompt": [5] * 500, "max_tokens": 13})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert error["message"] == (
        "This model's maximum context length is 512 tokens. However, you requested 513 tokens (500 in the prompt, "
        "13 in the completion). Please reduce the length of the prompt, or max_tokens to 12."
    )
    error = server.error(TEXT, {"prompt": [5] * 1512})
    assert error["param"] == "prompt"
    assert error["message"] == (
        "This model's maximum context length is 512 tokens. However, your prompt has 1512 tokens, and at least one "
        "must follow. Please reduce the length of the prompt, or raise max_model_len."
    )
    long = [{"role": "user", "content": "x" * 600}]
    assert server.error(CHAT, {"messages": long})["param"] == "messages"
    error = server.error(CHAT, {"messages": MESSAGES, "max_completion_tokens": 511})
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
def test_another_model_is_not_found(server: Server, path: str) -> None:
    bodies = BODIES | {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}
    error = server.error(path, bodies[path] | {"model": "gpt-9"}, status=404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    messages: list[Any] = MESSAGES
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=messages)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
    assert bad.value.param == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b"3",
        b'{"prompt": NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_json_is_refused(server: Server, body: bytes) -> None:
    answer = server.http.post(server.url + TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_another_media_type_is_refused(server: Server) -> None:
    answer = server.http.post(server.url + TEXT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    kind = {"Content-Type": "application/JSON; charset=utf-8"}
    assert server.http.post(server.url + TEXT, content=b'{"prompt":"a"}', headers=kind).status_code == 200


def test_a_body_that_is_too_long_is_refused(tiny_directory: Any) -> None:
    with serving(str(tiny_directory), options=ServerOptions(max_body_bytes=1000), max_num_seqs=2) as small:
        assert small.error(TEXT, {"prompt": "x" * 2000}, status=413)["code"] == "body_too_long"
        assert small.post(TEXT, {"prompt": "x"}).status_code == 200


def test_unknown_routes_and_methods_are_errors_of_the_same_shape(server: Server) -> None:
    missing = server.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = server.get(CHAT)
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert server.post("/health", {}).headers["allow"] == "GET"


def test_priorities_are_accepted_only_with_the_priority_policy(tiny_directory: Any) -> None:
    with serving(str(tiny_directory), max_num_seqs=2, scheduling_policy="priority") as ordered:
        for path, body in BODIES.items():
            assert ordered.post(path, body | {"priority": -3, "ignore_eos": False}).status_code == 200
            assert ordered.error(path, body | {"priority": 2**40})["param"] == "priority"


def test_a_full_queue_is_a_503_with_retry_after(server: Server) -> None:
    server.queue.is_full = True
    try:
        answer = server.post(CHAT, BODIES[CHAT])
        for path, body in {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}.items():
            assert server.error(path, body, status=503)["code"] == "queue_full"
    finally:
        server.queue.is_full = False
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "queue_full"
    assert server.metrics.refusals[-1] == "queue_full"


def test_errors_do_not_contain_the_prompt(server: Server) -> None:
    for path, body in (
        (TEXT, {"prompt": ["secret", 3]}),
        (CHAT, {"messages": [{"role": "user", "content": "secret"}], "temperature": -1}),
        (CHAT, {"messages": [{"role": "user", "content": {"secret": 1}}]}),
    ):
        assert "secret" not in str(server.error(path, body))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_constraints_that_exclude_each_other_are_refused(server: Server, path: str) -> None:
    given = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}}
    assert server.error(path, BODIES[path] | given)["param"] == "structured_outputs"
    assert server.post(path, BODIES[path] | {"response_format": {"type": "text"}}).status_code == 200
