"""LlamaIndex with OpenAILike: chat, completion, streams, structured output, tools, embeddings, and its errors."""

from __future__ import annotations

from typing import Literal

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: client
llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=64,
)
# docs: end
question = [ChatMessage(role="user", content="Name a colour.")]


# docs: model
class Reading(BaseModel):
    """What a thermometer shows."""

    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


# docs: end


@check
def chat() -> None:
    # docs: chat
    answer = llm.chat([ChatMessage(role="user", content="Name a colour.")])
    print(answer.message.content)
    # docs: end
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.raw.usage.total_tokens == answer.raw.usage.prompt_tokens + answer.raw.usage.completion_tokens


@check
def complete_with_chat_and_without() -> None:
    assert llm.complete("One, two,").text
    plain = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, is_chat_model=False, max_tokens=4)
    assert plain.complete("One, two,").text
    assert "".join(part.delta for part in plain.stream_complete("One, two,"))


@check
def stream() -> None:
    # docs: stream
    for part in llm.stream_chat([ChatMessage(role="user", content="Name a colour.")]):
        print(part.delta, end="")
    # docs: end
    parts = list(llm.stream_chat(question))
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content


@check
async def async_chat_and_stream() -> None:
    assert (await llm.achat(question)).message.content
    assert "".join([part.delta or "" async for part in await llm.astream_chat(question)])


@check
def structured_output() -> None:
    # docs: structured
    answer = llm.as_structured_llm(Reading).chat([ChatMessage(role="user", content="How warm is it?")])
    print(answer.raw)  # a Reading
    # docs: end
    assert isinstance(answer.raw, Reading)


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


@check
def tools() -> None:
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(get_weather, fn_schema=Place)],
        user_msg="Weather in Rome?",
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in ("Rome", "Oslo")


@check
def embeddings() -> None:
    # docs: embeddings
    embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=KEY)
    print(len(embedding.get_text_embedding("First text")))
    # docs: end
    assert len(embedding.get_text_embedding_batch(["First text", "Second text"])) == 2


@check
def errors_are_the_classes_of_the_client() -> None:
    with raises(openai.AuthenticationError):
        OpenAILike(model=MODEL, api_base=URL, api_key="wrong", is_chat_model=True).chat(question)
    with raises(openai.NotFoundError):
        OpenAILike(model="unknown", api_base=URL, api_key=KEY, is_chat_model=True).chat(question)
    with raises(openai.BadRequestError, "maximum context length"):
        llm.chat([ChatMessage(role="user", content=TOO_LONG)])


if __name__ == "__main__":
    main("llama-index-llms-openai-like")
