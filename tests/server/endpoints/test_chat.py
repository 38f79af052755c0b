"""The chat endpoint, through the real client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.serving import MODEL, Server

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
GREEDY: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 12}
NO_EOS = {"ignore_eos": True}


def test_a_chat_completion_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, **GREEDY, extra_body=NO_EOS)
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_has_the_role_first_the_reason_last_and_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, **GREEDY, extra_body=NO_EOS).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            **ASK, **GREEDY, stream=True, stream_options={"include_usage": True}, extra_body=NO_EOS
        )
    )
    *answer, usage = chunks
    assert answer[0].choices[0].delta.role == "assistant" and answer[0].choices[0].delta.content == ""
    assert [chunk.choices[0].finish_reason for chunk in answer] == [None] * (len(answer) - 1) + ["length"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == whole
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_runs_many_streams_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"number {number}"}]
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, extra_body=NO_EOS, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(12)))
            alone = [await ask(client, number) for number in range(12)]
            assert together == alone and len(set(alone)) == 12

    asyncio.run(main())


def test_n_answers_come_with_their_index_streamed_or_not(client: openai.OpenAI) -> None:
    asked = {**ASK, "n": 3, "seed": 5, "max_tokens": 8, "extra_body": NO_EOS}
    whole = client.chat.completions.create(**asked)
    texts = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(texts.values())) == 3


def test_the_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        return client.chat.completions.create(**ASK, seed=seed, max_tokens=8).choices[0].message.content

    assert answer(1) == answer(1) != answer(2)


def test_logprobs_name_the_tokens_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, **GREEDY, logprobs=True, top_logprobs=2, extra_body=NO_EOS)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 12
    for entry in logprobs.content:
        assert entry.token == entry.top_logprobs[0].token and len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob > entry.top_logprobs[1].logprob
    text = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert text.decode("utf-8", "replace") == answer.choices[0].message.content


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked = {**ASK, **GREEDY, "logprobs": True, "top_logprobs": 1, "extra_body": NO_EOS}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole is not None and streamed == whole.content


def test_content_parts_are_joined(client: openai.OpenAI) -> None:
    def answer(content: Any) -> str | None:
        messages: list[Any] = [{"role": "user", "content": content}]
        made = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
        return made.choices[0].message.content

    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]
    assert answer(parts) == answer("two\nparts")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_that_is_not_text_is_refused_by_name(server: Server, kind: str) -> None:
    content = [{"type": kind, kind: {"url": "http://127.0.0.1/secret"}}]
    error = server.error("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert error["param"] == "messages" and kind in error["message"] and "secret" not in error["message"]


def test_a_final_message_can_be_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<user>hi\n<assistant>I am"
    answer = server.post("/v1/chat/completions", {**body, **GREEDY}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    error = server.error("/v1/chat/completions", body | {"add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "name", ["tokenize", "return_tensors", "messages", "no_such_variable", "a b", "m", "content", "endfor"]
)
def test_template_variables_that_the_template_does_not_read_are_refused(server: Server, name: str) -> None:
    error = server.error("/v1/chat/completions", {**ASK, "chat_template_kwargs": {name: True}})
    assert error["param"].startswith("chat_template_kwargs")


def test_token_ids_are_returned_on_request(server: Server) -> None:
    asked = {**ASK, **GREEDY, **NO_EOS, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", asked).json()
    chunks = server.chunks("/v1/chat/completions", asked)
    assert len(whole["choices"][0]["token_ids"]) == 12
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("more", [{}, {"use_beam_search": True, "n": 2}])
def test_fields_that_were_not_asked_for_are_null(server: Server, more: dict[str, Any]) -> None:
    chat = server.post("/v1/chat/completions", {**ASK, "max_tokens": 3, **more}).json()
    completion = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 3, **more}).json()["choices"][0]
    for holder in (chat, completion):
        assert (holder["prompt_logprobs"], holder["prompt_token_ids"]) == (None, None)
    for choice in (chat["choices"][0], completion):
        assert choice["token_ids"] is None


def test_every_chunk_has_the_usage_so_far_on_request(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks("/v1/chat/completions", {**ASK, **GREEDY, **NO_EOS, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 12
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("options", [None, {"continuous_usage_stats": True}, {"include_usage": False}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_chunks_have_no_usage_unless_it_is_asked_for(server: Server, path: str, options: Any) -> None:
    ask = ASK if path.endswith("chat/completions") else {"prompt": "hi"}
    chunks = server.chunks(path, {**ask, "max_tokens": 4, "stream_options": options})
    assert chunks and not any("usage" in chunk for chunk in chunks)


def test_beams_are_answered_best_first_and_never_streamed(server: Server) -> None:
    asked = {**ASK, "use_beam_search": True, "n": 2, "max_tokens": 4, "logprobs": True}
    choices = server.post("/v1/chat/completions", asked).json()["choices"]
    sums = [sum(entry["logprob"] for entry in choice["logprobs"]["content"]) for choice in choices]
    assert len(choices) == 2 and sums == sorted(sums, reverse=True)
    assert server.error("/v1/chat/completions", asked | {"stream": True})["param"] == "stream"
    assert server.error("/v1/chat/completions", asked | {"top_k": 3})["param"] == "top_k"
