"""Pydantic AI: an agent with text, streamed, native and tool output, function tools, and its errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from tests.clients.checks import KEY, MODEL, TOO_LONG, URL, check, main, raises

# docs: client
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
# docs: end
SHORT = ModelSettings(max_tokens=32, temperature=0)


# docs: model
class Reading(BaseModel):
    """What a thermometer shows."""

    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


# docs: end


@check
def text() -> None:
    # docs: text
    result = Agent(model).run_sync("Name a colour.", model_settings={"max_tokens": 32})
    print(result.output, result.usage)
    # docs: end
    assert result.output and 0 < result.usage.output_tokens <= 32 and result.usage.input_tokens > 0


@check
async def stream() -> None:
    async with Agent(model).run_stream("Name a colour.", model_settings=SHORT) as result:
        parts = [part async for part in result.stream_text(delta=True)]
    assert "".join(parts) == await result.get_output()
    assert 0 < result.usage.output_tokens <= 32


@check
def native_output() -> None:
    # docs: native
    agent = Agent(model, output_type=NativeOutput(Reading))  # a JSON schema
    print(agent.run_sync("How warm is it?").output)  # a Reading
    # docs: end
    assert isinstance(agent.run_sync("How warm is it?").output, Reading)


@check
def tool_output() -> None:
    result = Agent(model, output_type=ToolOutput(Reading)).run_sync("How warm is it?")
    assert isinstance(result.output, Reading)


@check
async def tool_output_in_a_stream() -> None:
    async with Agent(model, output_type=Reading).run_stream("How warm is it?") as result:
        assert isinstance(await result.get_output(), Reading)


@check
def function_tools() -> None:
    """One call that is forced, and an answer after it: the requests that an agent sends with a model trained for it."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = ToolDefinition(name="get_weather", parameters_json_schema=schema)
    forced = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    messages = [ModelRequest.user_text_prompt("How is the weather in Rome?")]
    response = model_request_sync(
        model, messages, model_request_parameters=forced, model_settings=ModelSettings(parallel_tool_calls=False)
    )
    (call,) = response.tool_calls
    assert call.tool_name == "get_weather" and call.args_as_dict()["city"] in ("Rome", "Oslo")
    returned = ToolReturnPart(tool_name=call.tool_name, content="sunny", tool_call_id=call.tool_call_id)
    messages += [response, ModelRequest(parts=[returned])]
    assert model_request_sync(model, messages, model_settings=SHORT).text


@check
def errors() -> None:
    wrong = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="wrong"))
    with raises(ModelHTTPError, "401"):
        Agent(wrong).run_sync("Hello!")
    unknown = OpenAIChatModel("unknown", provider=OpenAIProvider(base_url=URL, api_key=KEY))
    with raises(ModelHTTPError, "404"):
        Agent(unknown).run_sync("Hello!")
    with raises(ModelHTTPError, "400", "maximum context length"):
        Agent(model).run_sync(TOO_LONG)


if __name__ == "__main__":
    main("pydantic-ai-slim")
