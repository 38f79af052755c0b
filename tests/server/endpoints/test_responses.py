"""The Responses endpoint, through the real client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.serving import MODEL, Server

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 8}
NO_EOS = {"ignore_eos": True}


def test_text_is_answered_with_text(client: openai.OpenAI, server: Server) -> None:
    response = client.responses.create(model=MODEL, input="hello", instructions="be brief", extra_body=NO_EOS, **GREEDY)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **NO_EOS}
    chat = server.post("/v1/chat/completions", body).json()
    assert response.output_text == chat["choices"][0]["message"]["content"] != ""
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 8
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_has_the_events_of_a_response_in_their_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="hello", extra_body=NO_EOS, **GREEDY)
    events = list(client.responses.create(model=MODEL, input="hello", stream=True, extra_body=NO_EOS, **GREEDY))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4 : 4 + len(deltas)]) == {"response.output_text.delta"}
    assert kinds[4 + len(deltas) :] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text


def test_the_openai_client_reads_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hello", extra_body={"seed": 1}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds and final.output_text


def test_an_answer_that_ends_by_itself_is_completed(server: Server) -> None:
    body = {"input": "hello", "seed": 1, "max_output_tokens": 400}
    answer = server.post(PATH, body).json()
    assert answer["status"] == "completed" and answer["incomplete_details"] is None


def test_items_and_parts_make_the_same_conversation(server: Server) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"role": "user", "content": "again"},
    ]
    answer = server.post(PATH, {"input": items, **GREEDY}).json()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "again"},
    ]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert answer["usage"]["input_tokens"] == count


def test_logprobs_are_returned_if_included(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="hello",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        extra_body=NO_EOS,
        **GREEDY,
    )
    (part,) = response.output[0].content  # type: ignore[union-attr]
    assert len(part.logprobs) == 8 and len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_are_shown_as_the_model_saw_them_if_asked_for(client: openai.OpenAI, stream: bool) -> None:
    shown: Any = {"enable_response_messages": True, **NO_EOS}
    response: Any = client.responses.create(model=MODEL, input="hello", extra_body=shown, stream=stream, **GREEDY)
    if stream:
        response = list(response)[-1].response
    ((prompt,), (answer,)) = response.input_messages, response.output_messages
    assert "hello" in prompt["message"] and len(prompt["tokens"]) == response.usage.input_tokens
    assert (answer["type"], answer["message"]) == ("raw_message_tokens", response.output_text)
    assert len(answer["tokens"]) == 8


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"temperature": "x"}, "temperature"),
        ({"text": {"colour": 1}}, "text.colour"),
        ({"text": {"format": 3}}, "text.format"),
        ({"stream_options": {}}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"inputs": 1}, "inputs"),
    ],
)
def test_stored_state_and_wrong_values_are_refused(server: Server, more: dict[str, Any], param: str) -> None:
    assert server.error(PATH, {"input": "hi", **more})["param"] == param


@pytest.mark.parametrize(
    "more",
    [
        {"store": True},
        {"reasoning": {"effort": "high"}},
        {"text": {"verbosity": "low"}},
        {"background": False},
        {"metadata": {"a": "b"}},
        {"tools": []},
    ],
)
def test_neutral_values_are_accepted(server: Server, more: dict[str, Any]) -> None:
    assert server.post(PATH, {"input": "hi", "max_output_tokens": 1, **more}).status_code == 200
