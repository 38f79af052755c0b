"""Fields and routes under vLLM's names: tokens by their ids, chosen log-probabilities, truncation, echo, batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.options import ServerOptions
from tests.server.serving import Server, serving

CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
NAMED = {"logprob_token_ids": [5, 40], "allowed_token_ids": [30], "return_tokens_as_token_ids": True}


@pytest.fixture(scope="module")
def generous(tiny_directory: Path) -> Iterator[Server]:
    """A server that gives all log-probabilities, names tokens by their ids, and tells the usage in every chunk."""
    options = ServerOptions(max_logprobs=-1, return_tokens_as_token_ids=True, enable_force_include_usage=True)
    with serving(str(tiny_directory), options=options, max_num_seqs=4, num_gpu_blocks_override=128) as running:
        yield running


def test_a_chat_has_the_logprobs_of_the_tokens_that_it_names(server: Server) -> None:
    asked = {"messages": HELLO, **GREEDY, "logprobs": True, "top_logprobs": 3, **NAMED}
    content = server.post(CHAT, asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:30"] * 4
    assert {top["token"] for top in content[0]["top_logprobs"]} == {"token_id:5", "token_id:30", "token_id:40"}
    (first, *_) = (chunk for chunk in server.chunks(CHAT, asked) if chunk["choices"][0]["logprobs"])
    assert {top["token"] for top in first["choices"][0]["logprobs"]["content"][0]["top_logprobs"]} == {
        "token_id:5",
        "token_id:30",
        "token_id:40",
    }


def test_a_completion_has_the_logprobs_of_the_tokens_that_it_names(server: Server) -> None:
    asked = {"prompt": "hello", **GREEDY, "logprobs": 2, **NAMED}
    found = server.post(COMPLETIONS, asked).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:30"] * 4
    assert set(found["top_logprobs"][0]) == {"token_id:5", "token_id:30", "token_id:40"}


def test_named_tokens_need_logprobs_and_have_to_exist(server: Server) -> None:
    for more in ({}, {"logprobs": True, "logprob_token_ids": [10**6]}, {"logprobs": True, "logprob_token_ids": []}):
        asked = {"messages": HELLO, "logprob_token_ids": [5], **more}
        assert server.error(CHAT, asked)["param"] == "logprob_token_ids"


def test_all_logprobs_are_given_where_the_server_allows_them(server: Server, generous: Server) -> None:
    asked = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    assert server.error(CHAT, asked)["param"] == "top_logprobs"
    (entry,) = generous.post(CHAT, asked).json()["choices"][0]["logprobs"]["content"]
    assert len({top["token"] for top in entry["top_logprobs"]}) == generous.services.engine.spec.vocab_size
    of_prompt = generous.post(CHAT, {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": -1}).json()
    assert len(of_prompt["prompt_logprobs"][1]) == generous.services.engine.spec.vocab_size


def test_a_server_may_name_all_tokens_by_their_ids(generous: Server) -> None:
    asked = {"prompt": "hello", **GREEDY, "logprobs": 0}
    names = generous.post(COMPLETIONS, asked).json()["choices"][0]["logprobs"]["tokens"]
    assert all(name.startswith("token_id:") for name in names)
    names = generous.post(COMPLETIONS, {**asked, "return_tokens_as_token_ids": False}).json()["choices"][0]["logprobs"]
    assert not any(name.startswith("token_id:") for name in names["tokens"])


@pytest.mark.parametrize(("path", "given"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})])
def test_a_server_may_tell_the_usage_in_every_chunk(generous: Server, path: str, given: dict[str, Any]) -> None:
    usages = [chunk["usage"] for chunk in generous.chunks(path, {**given, **GREEDY})]
    assert all(usage["prompt_tokens"] > 0 for usage in usages)
    assert usages[-1]["completion_tokens"] == usages[-2]["completion_tokens"] == 4


@pytest.mark.parametrize(("side", "kept"), [("left", [6, 7, 8]), ("right", [1, 2, 3]), (None, [6, 7, 8])])
def test_a_prompt_is_truncated_on_the_side_that_is_asked_for(server: Server, side: str | None, kept: list[int]) -> None:
    asked = {"prompt": [1, 2, 3, 4, 5, 6, 7, 8], **GREEDY, "truncate_prompt_tokens": 3, "return_token_ids": True}
    answer = server.post(COMPLETIONS, {**asked, "truncation_side": side}).json()
    assert answer["choices"][0]["prompt_token_ids"] == kept


def test_an_echoed_chat_starts_with_the_message_that_it_continues(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "An apple a day"}]
    asked = {"messages": messages, **GREEDY, "continue_final_message": True, "add_generation_prompt": False}
    plain, echoed = (server.post(CHAT, {**asked, "echo": echo}).json()["choices"][0] for echo in (False, True))
    assert echoed["message"]["content"] == "An apple a day" + plain["message"]["content"]
    chunks = server.chunks(CHAT, {**asked, "echo": True})
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert streamed == echoed["message"]["content"]


def test_an_echoed_chat_after_a_message_of_the_user_has_only_the_answer(server: Server) -> None:
    plain, echoed = (server.post(CHAT, {"messages": HELLO, **GREEDY, "echo": echo}).json() for echo in (False, True))
    assert plain["choices"] == echoed["choices"]


def test_a_batch_of_conversations_has_a_choice_for_each(server: Server) -> None:
    conversations = [HELLO, [{"role": "user", "content": "goodbye and farewell"}]]
    together = server.post(BATCH, {"messages": conversations, **GREEDY}).json()
    alone = [server.post(CHAT, {"messages": one, **GREEDY}).json() for one in conversations]
    assert [choice["index"] for choice in together["choices"]] == [0, 1]
    assert [choice["message"] for choice in together["choices"]] == [one["choices"][0]["message"] for one in alone]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert together["object"] == "chat.completion" and server.queue.num_open == 0


@pytest.mark.parametrize(
    ("more", "param"),
    [({"stream": True}, "stream"), ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"), ({}, "messages")],
)
def test_a_batch_of_conversations_refuses_what_has_no_meaning_there(
    server: Server, more: dict[str, Any], param: str
) -> None:
    assert server.error(BATCH, {"messages": [HELLO] if more else [], **more})["param"] == param


def test_an_invocation_is_answered_by_the_route_of_its_body(server: Server) -> None:
    for path, given in ((CHAT, {"messages": HELLO, **GREEDY}), (COMPLETIONS, {"prompt": "hello", **GREEDY})):
        assert server.post("/invocations", given).json()["choices"] == server.post(path, given).json()["choices"]
    assert server.post("/invocations", {"messages": [HELLO, HELLO], **GREEDY}).json()["choices"][1]["index"] == 1
    assert server.post("/invocations", {"input": "hello"}).json()["object"] == "list"
    assert server.error("/invocations", {"text": "hello"})["param"] == "messages"
    assert [chunk["object"] for chunk in server.chunks("/invocations", {"prompt": "hello", **GREEDY})]


def test_a_ping_is_answered_as_health_is(server: Server) -> None:
    assert server.get("/ping").status_code == server.post("/ping", {}).status_code == 200


def test_the_load_is_reported_in_the_format_that_is_asked_for(server: Server) -> None:
    asked = {"prompt": "hello", **GREEDY}
    name = "endpoint-load-metrics"
    text, as_json, other = (
        server.post(COMPLETIONS, asked, headers={f"{name}-format": form}).headers.get(name)
        for form in ("TEXT", "json", "XML")
    )
    assert text is not None and text.startswith("TEXT named_metrics.kv_cache_usage_perc=") and other is None
    figures = json.loads((as_json or "").removeprefix("JSON "))["named_metrics"]
    assert figures.keys() == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert name not in server.post(COMPLETIONS, asked).headers


def test_the_page_of_the_api_loads_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text and "https://" not in page.text and 'getJson("openapi.json")' in page.text
