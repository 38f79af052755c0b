"""Responses with tools, stored and in the background, over the fake engine: the test writes the model's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.openai.response_items import pack_reasoning
from headrace.server.options import ServerOptions
from headrace.text.answer_parts import ContentDelta, ReasoningDelta
from tests.server.fake_engine import FakeEngine
from tests.server.fake_model import Model, prompt_of
from tests.server.serving import MODEL, Server, serving

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": None,
}


@pytest.fixture
def fake(tiny_directory: Path) -> FakeEngine:
    return FakeEngine(tiny_directory)


@pytest.fixture
def server(fake: FakeEngine) -> Iterator[Server]:
    with serving(start=fake, options=ServerOptions(max_stored_responses=20)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_call_is_an_item_and_its_result_continues_the_conversation(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    with Model(server, fake, [f"Let me see. {CALL}"], ["Sunny."]):
        first = client.responses.create(model=MODEL, input="How is Rome?", tools=[WEATHER], instructions="Be brief.")
        call = first.output[1]
        assert first.status == "completed" and first.output_text == "Let me see."
        assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
        assert first.tools[0].name == "weather" and first.store is True
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        second = client.responses.create(
            model=MODEL, previous_response_id=first.id, input=[result], tools=[WEATHER], max_output_tokens=50
        )
    assert second.output_text == "Sunny." and second.previous_response_id == first.id
    assert prompt_of(fake) == (
        "<tool weather>\n<user>How is Rome?\n<assistant>Let me see.\n<tool>12 degrees\n<assistant>"
    )  # the instructions are those of each request


def test_the_events_of_text_and_a_call_are_those_of_two_items(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    with Model(server, fake, ["Let ", "me. <tool", CALL[5:20], CALL[20:]]):
        events = list(client.responses.create(model=MODEL, input="hi", tools=[WEATHER], stream=True))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output and [item.id for item in added] == [item.id for item in final.output]
    assert (added[0].content, added[1].arguments, added[1].status) == ([], "", "in_progress")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == final.output[1].arguments == '{"city": "Rome"}'
    assert client.responses.retrieve(final.id).output == final.output


def test_reasoning_is_an_item_of_its_own(server: Server, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of a model that reasons returns deltas of reasoning."""
    from headrace.openai.answer_format import AnswerReader

    def read(reader: Any, text: str, *, is_end: bool = False) -> list[Any]:
        thought, _, said = text.partition("|")
        return [ReasoningDelta(thought), *([ContentDelta(said)] if said else [])]

    monkeypatch.setattr(AnswerReader, "read", read)
    body = {"input": "hi", "tools": [WEATHER], "include": ["reasoning.encrypted_content"], "store": False}
    with Model(server, fake, ["well|yes"], ["we", "ll|yes"]):
        whole = server.post(PATH, body).json()
        events = server.post(PATH, body | {"stream": True}).text
    reasoning, message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "well"}] and reasoning["summary"] == []
    assert reasoning["encrypted_content"] == pack_reasoning("well") and message["content"][0]["text"] == "yes"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 4  # characters are tokens here
    assert events.count("event: response.reasoning_text.delta") == 2
    assert events.index("response.reasoning_text.done") < events.index("response.output_text.delta")


def test_packed_reasoning_is_read_again(server: Server, fake: FakeEngine) -> None:
    packed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": pack_reasoning("hm")}
    items = [{"role": "user", "content": "hi"}, packed, {"role": "assistant", "content": "yes?"}]
    with Model(server, fake, ["ok"]):
        assert server.post(PATH, {"input": [*items, {"role": "user", "content": "go"}]}).status_code == 200
    assert prompt_of(fake) == "<user>hi\n<assistant>yes?\n<user>go\n<assistant>"


def test_functions_of_a_namespace_are_called_by_their_own_names(server: Server, fake: FakeEngine) -> None:
    tools = [{"type": "namespace", "name": "sky", "description": "", "tools": [WEATHER]}]
    said = '<tool_call>\n{"name": "sky.weather", "arguments": {}}\n</tool_call>'
    with Model(server, fake, [said], ["Sunny."]):
        (call,) = server.post(PATH, {"input": "hi", "tools": tools}).json()["output"]
        assert (call["namespace"], call["name"]) == ("sky", "weather")
        items = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "12"}]
        assert server.post(PATH, {"input": items, "tools": tools}).status_code == 200
    assert prompt_of(fake).startswith("<tool sky.weather>")


def test_items_are_referred_to_by_their_ids(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, [CALL], ["Sunny."]):
        first = server.post(PATH, {"input": "hi", "tools": [WEATHER]}).json()
        (call,) = first["output"]
        items = [
            {"role": "user", "content": "hi"},
            {"type": "item_reference", "id": call["id"]},
            {"type": "function_call_output", "call_id": call["call_id"], "output": "12"},
        ]
        assert server.post(PATH, {"input": items}).json()["status"] == "completed"
    assert "<tool>12" in prompt_of(fake)


def test_a_response_is_read_listed_and_deleted(server: Server, fake: FakeEngine, client: openai.OpenAI) -> None:
    with Model(server, fake, ["One."], ["Two."], ["Three."]):
        first = client.responses.create(model=MODEL, input="a", metadata={"k": "v"})
        second = client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        unstored = client.responses.create(model=MODEL, input="c", previous_response_id=second.id, store=False)
    assert client.responses.retrieve(first.id) == first and first.metadata == {"k": "v"}
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["a", "One.", "b"]  # type: ignore[union-attr]
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["b", "One."] and page.has_more  # type: ignore[union-attr]
    assert [item.content[0].text for item in page] == ["b", "One.", "a"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.retrieve(unstored.id),
        lambda: client.responses.delete("resp_x"),
        lambda: client.responses.input_items.list("resp_x"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError, match="no stored response"):
        client.responses.create(model=MODEL, input="d", previous_response_id=unstored.id)


def test_a_background_response_is_queued_then_in_progress_then_completed(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    queued = client.responses.create(model=MODEL, input="hi", background=True)
    assert queued.status == "queued" and queued.background is True
    server.wait_until(lambda: len(fake.client.requests) == 1)
    with pytest.raises(openai.BadRequestError, match="wait for its end"):
        client.responses.create(model=MODEL, input="b", previous_response_id=queued.id)
    server.on_loop(lambda: fake.client.send("Yes"))
    server.wait_until(lambda: server.services.responses.find("", queued.id).status == "in_progress")
    assert client.responses.retrieve(queued.id).status == "in_progress" and server.queue.num_open == 1
    server.on_loop(lambda: fake.client.send(".", reason="stop"))
    server.wait_until(lambda: not server.services.background)
    ended = client.responses.retrieve(queued.id)
    assert ended.status == "completed" and ended.output_text == "Yes." and ended.usage.output_tokens == 4
    assert client.responses.cancel(queued.id).status == "completed"
    assert server.queue.num_open == 0 == server.services.num_in_flight and server.metrics.reasons == ["stop"]


@pytest.mark.parametrize("has_run", [True, False])
def test_a_background_response_is_cancelled(
    server: Server, fake: FakeEngine, client: openai.OpenAI, has_run: bool
) -> None:
    queued = client.responses.create(model=MODEL, input="hi", background=True)
    if has_run:
        server.wait_until(lambda: len(fake.client.requests) == 1)
        server.on_loop(lambda: fake.client.send("Yes"))
    assert client.responses.cancel(queued.id).status == "cancelled" == client.responses.retrieve(queued.id).status
    assert server.queue.num_open == 0 and not server.services.background
    assert len(fake.client.aborted) == len(fake.client.requests)


def test_a_background_response_whose_engine_fails_has_failed(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    queued = client.responses.create(model=MODEL, input="hi", background=True)
    server.wait_until(lambda: len(fake.client.requests) == 1)
    server.on_loop(lambda: fake.client.send("Y", reason="abort", error="out of memory"))
    server.wait_until(lambda: not server.services.background)
    failed = client.responses.retrieve(queued.id)
    assert failed.status == "failed" and failed.error is not None and failed.error.code == "server_error"


def test_a_background_stream_can_be_left_and_followed_again(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    with client.responses.create(model=MODEL, input="hi", background=True, stream=True) as stream:
        seen = [next(stream), next(stream)]
    assert [event.type for event in seen] == ["response.created", "response.queued"]
    id = seen[0].response.id  # type: ignore[union-attr]
    server.wait_until(lambda: len(fake.client.requests) == 1)
    server.on_loop(lambda: fake.client.send("Yes"))
    server.on_loop(lambda: fake.client.send(".", reason="stop"))
    with pytest.raises(openai.BadRequestError, match="starting_after must be an integer"):
        client.responses.retrieve(id, stream=True, extra_query={"starting_after": "9" * 5000})
    rest = list(client.responses.retrieve(id, stream=True, starting_after=1))
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(rest) + 2))
    assert rest[0].type == "response.in_progress" and rest[-1].type == "response.completed"
    assert not fake.client.aborted


def test_only_a_background_response_is_cancelled_or_streamed_again(
    server: Server, fake: FakeEngine, client: openai.OpenAI
) -> None:
    with Model(server, fake, ["Yes."]):
        response = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        list(client.responses.retrieve(response.id, stream=True))


def test_truncation_drops_the_first_turns(server: Server, fake: FakeEngine) -> None:
    turns = [
        {"role": role, "content": f"{number}{role[0] * 60}"} for number in range(8) for role in ("user", "assistant")
    ]
    body = {"input": [*turns, {"role": "user", "content": "last"}], "instructions": "Rules.", "max_output_tokens": 100}
    assert server.error(PATH, body)["code"] == "context_length_exceeded"
    with Model(server, fake, ["ok"]):
        assert server.post(PATH, body | {"truncation": "auto"}).status_code == 200
    prompt = prompt_of(fake)
    assert prompt.startswith("<system>Rules.\n<user>6") and prompt.endswith("<user>last\n<assistant>")
    alone = body | {"input": "x" * 600, "truncation": "auto"}
    assert server.error(PATH, alone)["code"] == "context_length_exceeded"


def test_a_header_that_is_sent_twice_replaces_no_stored_response(server: Server, fake: FakeEngine) -> None:
    with Model(server, fake, ["One."], ["Two."]):
        ids = [server.post(PATH, {"input": "a", "request_id": None}).json()["id"] for _ in range(2)]
    assert len(set(ids)) == 2
    with Model(server, fake, ["One."]):
        assert server.post(PATH, {"input": "a", "request_id": "mine"}).json()["id"] == "resp_mine"
    assert server.error(PATH, {"input": "a", "request_id": "mine"})["param"] == "request_id"


def test_a_server_without_storage_stores_nothing(fake: FakeEngine) -> None:
    with serving(start=fake, options=ServerOptions(max_stored_responses=0)) as server:
        with Model(server, fake, ["One."]):
            answer = server.post(PATH, {"input": "a"}).json()
        assert answer["store"] is False and server.get(f"{PATH}/{answer['id']}").status_code == 404
        assert server.error(PATH, {"input": "a", "background": True})["param"] == "background"
