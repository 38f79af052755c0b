"""Reasoning in the answers to OpenAI's chat lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.engine.prompts import PromptReader
from headrace.errors import ConfigError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.lines import LineParser
from headrace.jobs.input.prepare import LinePreparer, Work
from headrace.jobs.input.prepare_wire import ItemReader, ItemWriter
from headrace.jobs.input.reply import JobFacts
from headrace.jobs.spec import JobSpec
from headrace.openai.parser_names import AUTOMATIC, ParserNames
from headrace.text import ChatTemplate, Tokenizer
from headrace.types import ReasoningSpan, StructuredOutputs
from tests.text.builders import byte_tokenizer

THINKING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}<a><think>\n"
ANSWER = "Let me see.\n</think>\n\nRome."


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ChatTemplate(THINKING)
    return tokenizer


def prepared(tokenizer: Tokenizer, names: ParserNames = AUTOMATIC, **body: Any) -> Work:
    body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    preparer = LinePreparer(LineParser({}, seed=0, model_name="fake"), PromptReader(tokenizer, 258), names)
    (item,) = preparer.prepare([InputLine(0, 0, json.dumps(line).encode())])
    (sent,) = ItemReader().items(ItemWriter().frame([item]))  # as another process would send it
    assert isinstance(sent, Work), sent
    return sent


def answered(tokenizer: Tokenizer, work: Work, text: str = ANSWER) -> dict[str, Any]:
    output = LineOutput(5, (LineAnswer(0, text, len(text), "stop"),))
    body: dict[str, Any] = json.loads(work.reply.answer(output, JobFacts("fake", tokenizer)))["response"]["body"]
    return body


def test_reasoning_is_a_field_of_its_own(tokenizer: Tokenizer) -> None:
    body = answered(tokenizer, prepared(tokenizer))
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("Rome.", *["Let me see."] * 2)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Let me see.")}


def test_a_line_can_leave_it_out_and_a_job_can_leave_it_in_the_text(tokenizer: Tokenizer) -> None:
    message = answered(tokenizer, prepared(tokenizer, include_reasoning=False))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Rome.", None)
    raw = answered(tokenizer, prepared(tokenizer, ParserNames(reasoning="none")))["choices"][0]["message"]
    assert raw["content"] == ANSWER and "reasoning" not in raw


def test_a_format_applies_after_the_reasoning(tokenizer: Tokenizer) -> None:
    outputs = prepared(tokenizer, response_format={"type": "json_object"}).params.structured_outputs
    assert isinstance(outputs, StructuredOutputs) and outputs.reasoning == ReasoningSpan(("</think>",))


def test_a_job_refuses_a_parser_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="reasoning_parser 'qwem3' is unknown, did you mean 'qwen3'"):
        JobSpec(input="a", output="b", parser_names=ParserNames(reasoning="qwem3"))
