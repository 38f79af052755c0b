"""Instructor: pydantic objects through tools, JSON and JSON schemas, in streams and with retries."""

from __future__ import annotations

from typing import Literal

import instructor
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.checks import KEY, MODEL, URL, check, main, raises

# docs: messages
messages = [{"role": "user", "content": "How warm is it?"}]
# docs: end


# docs: model
class Reading(BaseModel):
    kind: Literal["warm", "cold"]
    degrees: int = Field(ge=0, le=99)


# docs: end


@check
def json_schema() -> None:
    # docs: json-schema
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    print(client.create(model=MODEL, messages=messages, response_model=Reading))  # a Reading
    # docs: end
    reading, completion = client.create_with_completion(model=MODEL, messages=messages, response_model=Reading)
    assert isinstance(reading, Reading) and completion.usage.completion_tokens > 0


@check
def tools() -> None:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.TOOLS)
    assert isinstance(client.create(model=MODEL, messages=messages, response_model=Reading), Reading)


@check
def tools_strict() -> None:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.TOOLS_STRICT)
    assert isinstance(client.create(model=MODEL, messages=messages, response_model=Reading), Reading)


@check
def partial_objects_in_a_stream() -> None:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.create_partial(model=MODEL, messages=messages, response_model=Reading)
    assert last.kind in ("warm", "cold") and 0 <= last.degrees <= 99


@check
async def async_client() -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(await client.create(model=MODEL, messages=messages, response_model=Reading), Reading)


@check
def errors() -> None:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="wrong"), mode=instructor.Mode.JSON_SCHEMA)
    with raises(InstructorRetryException, "401"):
        client.create(model=MODEL, messages=messages, response_model=Reading, max_retries=1)


if __name__ == "__main__":
    main("instructor")
