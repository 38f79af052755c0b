"""LiteLLM: the provider `hosted_vllm`, with chat, streams, tools, structured output, embeddings and its errors."""

from __future__ import annotations

import json
from typing import Literal

import litellm
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: settings
settings = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY}
messages = [{"role": "user", "content": "Name a colour."}]
# docs: end
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
        },
    }
]


class Reading(BaseModel):
    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


@check
def chat() -> None:
    # docs: chat
    answer = litellm.completion(messages=messages, max_tokens=16, **settings)
    print(answer.choices[0].message.content, answer.usage.total_tokens)
    # docs: end
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_as_the_provider_openai() -> None:
    answer = litellm.completion(messages=messages, max_tokens=8, **{**settings, "model": f"openai/{MODEL}"})
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8


@check
def stream() -> None:
    # docs: stream
    for chunk in litellm.completion(messages=messages, max_tokens=16, stream=True, **settings):
        print(chunk.choices[0].delta.content or "", end="")
    # docs: end
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=messages, max_tokens=8, stream=True, stream_options=options, **settings))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
    assert rebuilt.choices[0].message.content and rebuilt.choices[0].finish_reason in ("stop", "length")
    assert 0 < rebuilt.usage.completion_tokens <= 8


@check
async def async_stream() -> None:
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await litellm.acompletion(messages=messages, max_tokens=8, stream=True, **settings)
    ]
    assert "".join(parts)


@check
def tools() -> None:
    answer = litellm.completion(
        messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **settings
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


@check
def structured_output() -> None:
    answer = litellm.completion(messages=messages, response_format=Reading, **settings)
    assert Reading.model_validate_json(answer.choices[0].message.content)


@check
def text_completion() -> None:
    answer = litellm.text_completion(prompt="One, two,", max_tokens=4, **settings)
    assert answer.choices[0].text and answer.choices[0].finish_reason == "length"


@check
def embeddings() -> None:
    # docs: embeddings
    answer = litellm.embedding(input=["First text", "Second text"], **settings)
    print(len(answer.data), len(answer.data[0]["embedding"]))
    # docs: end
    assert [item["index"] for item in answer.data] == [0, 1] and answer.usage.prompt_tokens > 0


@check
def responses() -> None:
    answer = litellm.responses(input="Name a colour.", max_output_tokens=8, **{**settings, "model": f"openai/{MODEL}"})
    assert answer.status in ("completed", "incomplete") and answer.output[0].content[0].text


@check
def errors_are_the_classes_of_the_client() -> None:
    with raises(litellm.AuthenticationError):
        litellm.completion(messages=messages, **{**settings, "api_key": "wrong"})
    with raises(litellm.NotFoundError, "unknown"):
        litellm.completion(messages=messages, **{**settings, "model": "hosted_vllm/unknown"})
    with raises(litellm.ContextWindowExceededError):  # a subclass of BadRequestError
        litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], **settings)
    with raises(litellm.BadRequestError, "temperature"):
        litellm.completion(messages=messages, temperature=-1, **settings)


if __name__ == "__main__":
    main("litellm")
