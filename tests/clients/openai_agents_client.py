"""OpenAI's Agents SDK, whose default model is the Responses API: a function tool, streamed, with stored state."""

from __future__ import annotations

from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.items import ToolCallItem, ToolCallOutputItem
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, URL, check, main, raises

# docs: client
set_default_openai_client(openai.AsyncOpenAI(base_url=URL, api_key=KEY))
set_tracing_disabled(True)  # traces would be sent to OpenAI
# docs: end


# docs: agent
@function_tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


agent = Agent(
    name="Weather",
    instructions="Answer in one short sentence.",
    model=MODEL,
    tools=[get_weather],
    model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0),
)
# docs: end


class Reading(BaseModel):
    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


@check
async def a_function_tool_and_the_answer_after_it() -> None:
    """The first turn must call the tool; then the agent leaves the choice to the model."""
    # docs: run
    result = await Runner.run(agent, "How is the weather in Rome?")
    print(result.final_output)
    # docs: end
    calls = [item for item in result.new_items if isinstance(item, ToolCallItem)]
    outputs = [item.output for item in result.new_items if isinstance(item, ToolCallOutputItem)]
    assert len(calls) == 1 and outputs[0] in ("sunny in Rome", "sunny in Oslo")
    assert result.final_output and result.context_wrapper.usage.requests == 2


@check
async def in_a_stream() -> None:
    result = Runner.run_streamed(agent, "How is the weather in Oslo?")
    kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert "response.function_call_arguments.delta" in kinds and "response.output_text.delta" in kinds
    assert result.final_output


@check
async def with_state_on_the_server() -> None:
    typed = Agent(name="Typed", model=MODEL, output_type=Reading)
    first = await Runner.run(typed, "How warm is it?")
    second = await Runner.run(typed, "And tomorrow?", previous_response_id=first.last_response_id)
    assert second.final_output and second.last_response_id != first.last_response_id
    stored = openai.OpenAI(base_url=URL, api_key=KEY).responses.input_items.list(second.last_response_id, order="asc")
    assert [item.role for item in stored] == ["user", "assistant", "user"]


@check
async def output_of_a_type() -> None:
    typed = Agent(name="Typed", model=MODEL, output_type=Reading)
    assert isinstance((await Runner.run(typed, "How warm is it?")).final_output, Reading)


@check
async def the_result_of_the_first_tool_as_output() -> None:
    once = agent.clone(tool_use_behavior="stop_on_first_tool")
    assert str((await Runner.run(once, "Rome?")).final_output).startswith("sunny in ")


@check
async def errors_are_the_classes_of_the_client() -> None:
    with raises(openai.NotFoundError, "unknown"):
        await Runner.run(Agent(name="Unknown", model="unknown"), "Hello!")


if __name__ == "__main__":
    main("openai-agents")
