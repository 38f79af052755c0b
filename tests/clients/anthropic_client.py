"""Anthropic's Python client: messages, streams, tools, token counts, errors, and what coding agents send."""

from __future__ import annotations

import anthropic

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: client
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
messages = [{"role": "user", "content": "Name a colour."}]
# docs: end


@check
def message() -> None:
    # docs: message
    message = client.messages.create(model=MODEL, max_tokens=32, system="Be brief.", messages=messages)
    print(message.content[0].text, message.stop_reason, message.usage)
    # docs: end
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0 and 0 < message.usage.output_tokens <= 32
    assert message._request_id


@check
def stream() -> None:
    # docs: stream
    with client.messages.stream(model=MODEL, max_tokens=32, messages=messages) as stream:
        for text in stream.text_stream:
            print(text, end="")
        message = stream.get_final_message()
    # docs: end
    assert message.content[0].text and message.usage.output_tokens > 0 and message.stop_reason
    kinds = [event.type for event in client.messages.create(model=MODEL, max_tokens=8, messages=messages, stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


# docs: tools
tools = [
    {
        "name": "get_weather",
        "description": "The weather in a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["city", "unit"],
        },
    }
]
# docs: end


@check
def tools_and_their_results() -> None:
    # docs: call
    question = {"role": "user", "content": "How is the weather in Rome?"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = client.messages.create(model=MODEL, max_tokens=200, messages=[question], tools=tools, tool_choice=choice)
    call = message.content[0]
    print(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [question, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = client.messages.create(model=MODEL, max_tokens=32, messages=turns, tools=tools)
    # docs: end
    assert call.type == "tool_use" and call.input["unit"] in ("celsius", "kelvin") and message.usage.output_tokens > 0
    failed = {**result, "is_error": True, "content": [{"type": "text", "text": "no such city"}]}
    turns[-1] = {"role": "user", "content": [failed, {"type": "text", "text": "What went wrong?"}]}
    assert client.messages.create(model=MODEL, max_tokens=16, messages=turns).content[0].text


@check
def tools_in_a_stream() -> None:
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=messages, tools=tools, tool_choice=choice
    ) as events:
        parts = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    assert parts and final.content[0].input.keys() == {"city", "unit"} and final.stop_reason == "tool_use"


@check
def stop_reasons() -> None:
    cut = client.messages.create(model=MODEL, max_tokens=3, messages=messages, extra_body={"ignore_eos": True})
    assert cut.stop_reason == "max_tokens"
    letters = [chr(code) for code in range(97, 112)]
    ended = client.messages.create(model=MODEL, max_tokens=64, messages=messages, stop_sequences=letters)
    assert ended.stop_reason == "stop_sequence" and ended.stop_sequence in letters


@check
def count_of_tokens() -> None:
    # docs: count
    print(client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.").input_tokens)
    # docs: end
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=tools).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=messages, tools=tools).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    again = client.messages.create(model=MODEL, max_tokens=1, messages=messages, tools=tools).usage
    assert again.cache_read_input_tokens > 0 and again.input_tokens < counted


@check
async def async_client() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL.removesuffix("/v1"), auth_token=KEY, api_key=None) as client:
        assert (await client.messages.create(model=MODEL, max_tokens=8, messages=messages)).content[0].text


@check
def what_coding_agents_send() -> None:
    """Many tools, marks for the cache, betas, thinking, more tokens than the context holds."""
    names = ("Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "WebFetch", "TodoWrite")
    many = [{**tools[0], "name": name, "cache_control": {"type": "ephemeral"}} for name in names]
    with client.beta.messages.stream(
        model=MODEL,
        max_tokens=32_000,
        system=[
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
                    {"type": "text", "text": "Read the file.", "cache_control": {"type": "ephemeral"}},
                ],
            }
        ],
        tools=many,
        tool_choice={"type": "tool", "name": "Read"},
        thinking={"type": "enabled", "budget_tokens": 31_999},
        metadata={"user_id": "user_x_session_y"},
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    ) as events:
        final = events.get_final_message()
    assert final.content[0].name == "Read" and final.stop_reason == "tool_use"


@check
def errors_are_the_classes_of_the_client() -> None:
    with raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="wrong").messages.create(
            model=MODEL, max_tokens=8, messages=messages
        )
    with raises(anthropic.NotFoundError, "not_found_error"):
        client.messages.create(model="claude", max_tokens=8, messages=messages)
    with raises(anthropic.BadRequestError, "invalid_request_error", "maximum context length"):
        client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": TOO_LONG}])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    with raises(anthropic.BadRequestError, "image"):
        client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": [image]}])


if __name__ == "__main__":
    main("anthropic")
