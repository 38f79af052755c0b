"""OpenAI's Python client: chat, streams, tools, structured output, responses, completions, embeddings, errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Literal

import openai
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: client
client = openai.OpenAI(base_url=URL, api_key=KEY)
messages = [{"role": "user", "content": "Name a colour."}]
# docs: end


@check
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    # docs: chat
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
    print(answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage)
    # docs: end
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 16


@check
def finish_reasons() -> None:
    body = {"min_tokens": 4}
    cut = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=4, extra_body=body)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 4
    form = {"structured_outputs": {"choice": ["red", "green"]}}
    ended = client.chat.completions.create(model=MODEL, messages=messages, extra_body=form)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].message.content in ("red", "green")


@check
def several_choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content)


@check
def stream() -> None:
    # docs: stream
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="")
        else:
            print(chunk.usage)  # the last chunk
    # docs: end
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *spoken, last = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason is not None for chunk in spoken] == [False] * (len(spoken) - 1) + [True]
    assert all(chunk.usage is None for chunk in spoken)
    assert last.choices == [] and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == whole.choices[0].message.content
    assert last.usage == whole.usage and len({chunk.id for chunk in chunks}) == 1


@check
def stream_helper() -> None:
    kinds = []
    form = {"structured_outputs": {"choice": ["red", "green"]}}
    with client.chat.completions.stream(model=MODEL, messages=messages, extra_body=form) as events:
        for event in events:
            kinds.append(event.type)
        final = events.get_final_completion()
    assert "content.delta" in kinds and kinds[-1] == "content.done"
    assert final.choices[0].message.content in ("red", "green") and final.choices[0].finish_reason == "stop"


@check
async def async_chat_and_streams() -> None:
    # docs: async
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        calls = [client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8) for _ in range(4)]
        for answer in await asyncio.gather(*calls):
            print(answer.choices[0].message.content)
        # docs: end
        assert answer.choices[0].message.content
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, stream=True
            )
        ]
        assert "".join(parts)


# docs: tools
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "kelvin"]}},
                "required": ["city", "unit"],
            },
        },
    }
]
# docs: end


@check
def tools_required() -> None:
    # docs: call
    question = [{"role": "user", "content": "How is the weather in Rome?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=question, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    print(call.function.name, json.loads(call.function.arguments))
    # docs: end
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] and arguments["unit"] in ("celsius", "kelvin")
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    after = client.chat.completions.create(
        model=MODEL,
        messages=[*question, answer.choices[0].message, result],
        tools=tools,
        tool_choice="none",
        max_tokens=8,
    )
    assert after.choices[0].message.tool_calls is None and after.choices[0].message.content


@check
def tools_by_name_in_a_stream() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools, tool_choice=choice) as events:
        deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        final = events.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert "".join(deltas) == call.function.arguments and json.loads(call.function.arguments).keys() == {"city", "unit"}
    assert final.choices[0].finish_reason == "tool_calls"


# docs: model
class Reading(BaseModel):
    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)
    tags: list[Literal["wet", "dry"]] = Field(max_length=2)


# docs: end


@check
def structured_output_with_parse() -> None:
    # docs: parse
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Reading, max_tokens=200, temperature=0
    )
    print(answer.choices[0].message.parsed)  # a Reading
    # docs: end
    assert isinstance(answer.choices[0].message.parsed, Reading)


@check
def truncated_output_is_an_error_of_parse() -> None:
    with raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=messages, response_format=Reading, max_tokens=3)


@check
def tools_with_parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[openai.pydantic_function_tool(Reading)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Reading)


@check
def responses() -> None:
    # docs: responses
    response = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16)
    print(response.output_text, response.status, response.usage)
    # docs: end
    assert response.output_text and response.status in ("completed", "incomplete")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    parsed = client.responses.parse(model=MODEL, input="Name a colour.", text_format=Reading, temperature=0)
    assert isinstance(parsed.output_parsed, Reading)


@check
def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input="Name a colour.", text_format=Reading) as events:
        seen = list(events)
        final = events.get_final_response()
    kinds = [event.type for event in seen]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and isinstance(final.output_parsed, Reading)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == final.output_text


# docs: response-tools
function_tools = [{"type": "function", "strict": True, **tools[0]["function"]}]
# docs: end


@check
def responses_with_tools_and_state() -> None:
    # docs: response-call
    response = client.responses.create(
        model=MODEL,
        input="How is the weather in Rome?",
        tools=function_tools,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    call = response.output[-1]
    print(call.name, json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    after = client.responses.create(model=MODEL, previous_response_id=response.id, input=[result], max_output_tokens=16)
    print(after.output_text)
    # docs: end
    assert call.type == "function_call" and call.name == "get_weather" and after.output_text
    kinds = [item.type for item in client.responses.input_items.list(after.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]
    again = client.responses.retrieve(after.id)
    assert again.output_text == after.output_text and again.previous_response_id == response.id
    client.responses.delete(response.id)
    with raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@check
def responses_with_tools_in_a_stream() -> None:
    choice = {"type": "function", "name": "get_weather"}
    with client.responses.stream(model=MODEL, input="Rome?", tools=function_tools, tool_choice=choice) as events:
        seen = list(events)
        final = events.get_final_response()
    deltas = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == final.output[0].arguments and final.output[0].name == "get_weather"
    assert json.loads(final.output[0].arguments).keys() == {"city", "unit"}
    parsed = client.responses.parse(
        model=MODEL,
        input="How warm is it?",
        tools=[openai.pydantic_function_tool(Reading)["function"] | {"type": "function"}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert parsed.output[0].name == "Reading"


@check
def responses_in_the_background() -> None:
    # docs: background
    response = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16, background=True)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.1)
        response = client.responses.retrieve(response.id)
    print(response.status, response.output_text)
    # docs: end
    assert response.output_text
    long = client.responses.create(model=MODEL, input="Count.", background=True, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


@check
def responses_refuse_tools_of_the_server() -> None:
    with raises(openai.BadRequestError, "web_search"):
        client.responses.create(model=MODEL, input="News?", tools=[{"type": "web_search"}])
    with raises(openai.BadRequestError, "no stored response"):
        client.responses.create(model=MODEL, input="Go on.", previous_response_id="resp_unknown")


@check
def completions() -> None:
    # docs: completions
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4)
    print([choice.text for choice in answer.choices])
    # docs: end
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage.completion_tokens <= 8
    echoed = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=0, echo=True, logprobs=1)
    assert echoed.choices[0].text == "One, two," == "".join(echoed.choices[0].logprobs.tokens)
    parts = list(client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, stream=True))
    assert "".join(part.choices[0].text for part in parts) and parts[-1].choices[0].finish_reason == "length"


@check
def embeddings() -> None:
    # docs: embeddings
    answer = client.embeddings.create(model=MODEL, input=["First text", "Second text"])
    print(len(answer.data), len(answer.data[0].embedding))
    # docs: end
    assert [item.index for item in answer.data] == [0, 1] and answer.usage.prompt_tokens > 0
    plain = client.embeddings.create(model=MODEL, input=["First text", "Second text"], encoding_format="float")
    for one, other in zip(answer.data, plain.data, strict=True):  # base64, decoded by the client, and numbers
        assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) < 1e-5
        assert abs(sum(value * value for value in one.embedding) - 1) < 1e-4


@check
def errors_are_the_classes_of_the_client() -> None:
    with raises(openai.AuthenticationError):
        openai.OpenAI(base_url=URL, api_key="wrong").chat.completions.create(model=MODEL, messages=messages)
    with raises(openai.NotFoundError, "unknown"):
        client.chat.completions.create(model="unknown", messages=messages)
    with raises(openai.NotFoundError):
        client.models.retrieve("unknown")
    with raises(openai.BadRequestError, "maximum context length"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
    with raises(openai.BadRequestError, "temperature"):
        client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)
    with raises(openai.BadRequestError, "maximum context length"):
        list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=100_000, stream=True))


@check
def raw_response_has_a_request_id() -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=2)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]


if __name__ == "__main__":
    main("openai")
