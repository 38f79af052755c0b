"""For any parameters a stream equals the unstreamed answer; no body causes an internal error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.openai.fields import LABELS, UNSUPPORTED
from headrace.server.endpoints import ROUTES
from tests.server.serving import Server

pytestmark = pytest.mark.properties

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

sampling = st.fixed_dictionaries(
    {"seed": st.integers(0, 9), "max_tokens": st.integers(1, 24)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1, 2]),
        "top_p": st.sampled_from([0.3, 1]),
        "top_k": st.sampled_from([-1, 1, 5]),
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["a", "é", "\n", "xyz", "e"]), max_size=3),
        "ignore_eos": st.booleans(),
        "min_tokens": st.just(1),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "return_token_ids": st.booleans(),
    },
)


@QUICK
@given(sampling, st.booleans(), st.sampled_from([None, 0, 2]))
def test_a_completion_stream_equals_the_unstreamed_answer(
    server: Server, params: dict[str, Any], echo: bool, logprobs: int | None
) -> None:
    body = {"prompt": ["once", "upon"], "echo": echo, "logprobs": logprobs, **params}
    whole = {choice["index"]: choice for choice in server.post(TEXT, body).json()["choices"]}
    chunks = server.chunks(TEXT, body | {"stream_options": {"include_usage": True}})
    assert len(whole) == 2 * params.get("n", 1)
    joined = {index: {"text": "", "tokens": [], "logprobs": []} for index in whole}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        one = joined[choice["index"]]
        one["text"] += choice["text"]
        one["tokens"] += choice.get("token_ids", [])
        one["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        one["end"] = (choice["finish_reason"], choice["stop_reason"])
    for index, choice in whole.items():
        assert joined[index]["text"] == choice["text"]
        assert joined[index]["tokens"] == (choice["token_ids"] or [])
        assert joined[index]["end"] == (choice["finish_reason"], choice["stop_reason"])
        assert joined[index]["logprobs"] == (choice["logprobs"] or {}).get("token_logprobs", [])
    assert chunks[-1]["usage"]["completion_tokens"] == server.post(TEXT, body).json()["usage"]["completion_tokens"]


@QUICK
@given(sampling, st.booleans())
def test_a_chat_stream_equals_the_unstreamed_answer(server: Server, params: dict[str, Any], logprobs: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": logprobs, **params}
    whole = {choice["index"]: choice for choice in server.post(CHAT, body).json()["choices"]}
    texts, ends = dict.fromkeys(whole, ""), {}
    for chunk in server.chunks(CHAT, body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        assert choice["index"] not in ends, "a chunk after the finish reason"
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == {index: choice["message"]["content"] for index, choice in whole.items()}
    assert ends == {index: choice["finish_reason"] for index, choice in whole.items()}


def names(path: str, *, only_fields: bool = False) -> list[str]:
    (body,) = [route.body for route in ROUTES if route.path == path and route.body is not None]
    fields = body.__struct_fields__
    return [*fields] if only_fields else [*fields, *UNSUPPORTED, *LABELS, "nonsense"]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, -1, 512]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["auto", "none", "user", "hi", "text", "json_object"]),
)
keys = st.one_of(st.text(max_size=5), st.sampled_from(["type", "role", "content", "text", "format", "name", "1"]))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({}, optional={"role": scalars, "content": values, "tool_calls": values, "name": scalars}),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A valid request with some fields replaced by arbitrary values."""
    good = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        TEXT: {"prompt": "hi", "max_tokens": 2},
        RESPONSES: {"input": "hi", "max_output_tokens": 2},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1]},
    }
    path = draw(st.sampled_from(list(good)))
    noise = draw(st.dictionaries(st.sampled_from(names(path)), values, max_size=4))
    noise.pop("stream", None)
    if path == CHAT and draw(st.booleans()):
        noise["messages"] = draw(messages)
    return path, {**good[path], **noise}


@settings(QUICK, max_examples=80)
@given(requests())
@example((CHAT, {"messages": [{"role": "user", "content": "\x00"}], "max_tokens": 1}))
@example((TEXT, {"prompt": "x", "logit_bias": {"²": 1}, "max_tokens": 1}))
@example((TEXT, {"prompt": "x", "request_id": "ü", "max_tokens": 1}))
def test_no_json_body_causes_an_internal_error(server: Server, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    answer = server.post(path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
        assert error["param"] is None or isinstance(error["param"], str)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(
    "extremes",
    [
        pytest.param((2**31, 2**63, 10**4000), id="positive"),
        pytest.param((-(2**31) - 1, 2**70), id="others", marks=pytest.mark.slow),
    ],
)
def test_no_large_number_in_any_field_causes_an_internal_error(
    server: Server, path: str, extremes: tuple[int, ...]
) -> None:
    """CVE-2026-21869: an unchecked integer was used as an index."""
    messages = [{"role": "user", "content": "hi"}]
    good = {CHAT: {"messages": messages, "max_tokens": 2}, TEXT: {"prompt": "hi", "max_tokens": 2}}
    body: dict[str, Any] = good.get(path, {"input": "hi", "max_output_tokens": 2})
    for name in names(path, only_fields=True):
        for value in extremes:
            for form in (value, [value], {f"{value}": 1}, {"1": value}):
                answer = server.post(path, body | {name: form})
                assert answer.status_code in (200, 400, 404), (name, answer.text)
    assert server.post(path, body).status_code == 200


@settings(QUICK, max_examples=60)
@given(st.one_of(st.binary(max_size=40), values.map(lambda value: json.dumps(value).encode())))
def test_no_bytes_cause_an_internal_error(server: Server, body: bytes) -> None:
    for path in (CHAT, TEXT, RESPONSES):
        answer = server.http.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
