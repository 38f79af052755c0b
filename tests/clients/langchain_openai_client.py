"""LangChain's ChatOpenAI and OpenAIEmbeddings: chat, streams, batches, tools, structured output, embeddings."""

from __future__ import annotations

from typing import Literal

import openai
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: client
llm = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=64)
# docs: end


# docs: model
class Reading(BaseModel):
    """What a thermometer shows."""

    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


# docs: end


# docs: tool
@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


# docs: end


@check
def chat() -> None:
    # docs: chat
    answer = llm.invoke("Name a colour.")
    print(answer.content, answer.usage_metadata)
    # docs: end
    assert answer.content and answer.response_metadata["finish_reason"] in ("stop", "length")
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer.response_metadata["model_name"] == MODEL


@check
def stream() -> None:
    # docs: stream
    for chunk in llm.stream("Name a colour."):
        print(chunk.content, end="")
    # docs: end
    whole = AIMessageChunk(content="")
    for chunk in llm.stream("Name a colour.", stream_usage=True):
        whole += chunk
    assert whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata["output_tokens"] > 0


@check
async def async_batch_and_stream() -> None:
    answers = await llm.abatch(["Name a colour.", "Name a river.", "Name a town."])
    assert len(answers) == 3 and all(answer.content for answer in answers)
    assert "".join([chunk.content async for chunk in llm.astream("Name a colour.")])


@check
def structured_output() -> None:
    # docs: structured
    print(llm.with_structured_output(Reading).invoke("How warm is it?"))  # a Reading
    # docs: end
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(Reading, method=method).invoke("How warm is it?")
        assert isinstance(found, Reading), method


@check
def tools() -> None:
    # docs: tools
    answer = llm.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke("Weather in Rome?")
    print(answer.tool_calls[0]["name"], answer.tool_calls[0]["args"])
    # docs: end
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and get_weather.invoke(call["args"]).startswith("sunny")
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert llm.invoke([HumanMessage("Weather in Rome?"), answer, result]).content


@check
def tools_in_a_stream() -> None:
    bound = llm.bind_tools([get_weather], tool_choice="get_weather")
    whole = AIMessageChunk(content="")
    for chunk in bound.stream("Weather in Oslo?"):
        whole += chunk
    assert [call["args"]["city"] in ("Rome", "Oslo") for call in whole.tool_calls] == [True]
    assert whole.response_metadata["finish_reason"] == "tool_calls"


@check
def logprobs() -> None:
    answer = llm.bind(logprobs=True, top_logprobs=2, max_tokens=2).invoke("Name a colour.")
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])


@check
def completions() -> None:
    text = OpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=4)
    assert text.invoke("One, two,") and "".join(text.stream("One, two,"))


@check
def responses_api() -> None:
    answer = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=16, use_responses_api=True).invoke("Hello!")
    assert answer.text and answer.usage_metadata["output_tokens"] > 0


@check
def responses_api_with_tools() -> None:
    # docs: responses
    llm = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, use_responses_api=True, use_previous_response_id=True)
    bound = llm.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    question = HumanMessage("Weather in Rome?")
    answer = bound.invoke([question])
    result = get_weather.invoke(answer.tool_calls[0])  # a ToolMessage
    print(llm.invoke([question, answer, result]).text)
    # docs: end
    assert answer.tool_calls[0]["name"] == "get_weather" and answer.response_metadata["status"] == "completed"
    assert llm.bind(max_output_tokens=16).invoke([question, answer, result]).text
    whole = AIMessageChunk(content="")
    for chunk in bound.stream("Weather in Oslo?"):
        whole += chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Oslo") and whole.usage_metadata["output_tokens"] > 0
    found = llm.with_structured_output(Reading, method="json_schema").invoke("How warm is it?")
    assert isinstance(found, Reading)


@check
def embeddings() -> None:
    # docs: embeddings
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False)
    print(len(embeddings.embed_documents(["First text", "Second text"])))
    # docs: end
    assert abs(sum(value**2 for value in embeddings.embed_query("First text")) - 1) < 1e-3


@check
def errors_are_the_classes_of_the_client() -> None:
    with raises(openai.AuthenticationError):
        ChatOpenAI(model=MODEL, base_url=URL, api_key="wrong").invoke("Hello!")
    with raises(openai.NotFoundError, "unknown"):
        ChatOpenAI(model="unknown", base_url=URL, api_key=KEY).invoke("Hello!")
    with raises(openai.BadRequestError, "maximum context length"):
        llm.invoke(TOO_LONG)


if __name__ == "__main__":
    main("langchain-openai")
