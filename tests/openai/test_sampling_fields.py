"""A sampling parameter is declared in `types.SamplingParams`. These tests fail where it is forgotten elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.sampling_flags import FLAGS
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.fields import SAMPLING_FIELDS
from headrace.jobs.input.lines import LineParser, LineRequest
from headrace.openai.fields import NOT_IN_BATCH, UNSUPPORTED
from headrace.openai.sampling import Limits, chat_limit, chat_params, completion_limit, completion_params
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.common import SamplingFields
from headrace.openai.schema.completions import CompletionRequest
from headrace.types import SamplingParams, StructuredOutputs

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
PAGE = (Path(__file__).parents[2] / "docs/server.md").read_text()

NOT_OVER_HTTP = {"detokenize": "answers of the API are text"}
NOT_IN_A_LINE = {**NOT_OVER_HTTP, "prompt_logprobs": "an output line has no place for them"}
NOT_A_FLAG = {
    "n": "a default for all lines would multiply the cost of a job unseen",
    "best_of": "like n",
    "logit_bias": "token ids are data of a request",
    "allowed_token_ids": "token ids are data of a request",
    "bad_words": "data of a request",
    "bad_words_token_ids": "token ids are data of a request",
    "seed": "--seed is the engine's, from which each line derives its own",
    "stop_token_ids": "token ids are data of a request",
    "include_stop_str_in_output": "changes the form of answers, which their reader decides",
    "logprobs": "changes the form of answers, which their reader decides",
    "logprob_token_ids": "token ids are data of a request",
    "prompt_logprobs": "an output line has no place for them",
    "detokenize": "answers are text",
    "skip_special_tokens": "changes the form of answers, which their reader decides",
    "structured_outputs": "an object, which a flag cannot hold",
}

# A value other than the default, for each field.
VALUES: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5],
    "bad_words": ["no"],
    "bad_words_token_ids": [[5]],
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "logprobs": 3,
    "logprob_token_ids": [5],
    "prompt_logprobs": 2,
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a"},
}


NEEDS: dict[str, dict[str, Any]] = {"logprob_token_ids": {"logprobs": 1}}  # what a field needs beside it


def as_given(name: str) -> Any:
    """The value as `SamplingParams` holds it."""
    value = VALUES[name]
    match name:
        case "logit_bias":
            return {int(token): bias for token, bias in value.items()}
        case "structured_outputs":
            return StructuredOutputs(**value)
        case "bad_words_token_ids":
            return tuple(map(tuple, value))
    return tuple(value) if isinstance(value, list) else value


def test_every_field_has_a_value_to_try() -> None:
    assert VALUES.keys() | NOT_OVER_HTTP.keys() == set(FIELDS)
    assert all(getattr(SamplingParams(), name) != as_given(name) for name in VALUES)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in NOT_OVER_HTTP])
def test_every_parameter_reaches_the_engine_from_both_endpoints(name: str) -> None:
    limits = Limits()
    text = CompletionRequest(prompt="a", **{name: VALUES[name]}, **NEEDS.get(name, {}))
    assert getattr(completion_params(text, limits, completion_limit(text)), name) == as_given(name)
    given = {"logprobs": True, "top_logprobs": VALUES[name]} if name == "logprobs" else {name: VALUES[name]}
    given |= {"logprobs": True} if name in NEEDS else {}
    chat = ChatRequest(messages=[], **given)
    assert getattr(chat_params(chat, limits, chat_limit(chat)), name) == as_given(name)


def test_a_parameter_that_is_not_over_http_is_refused_by_its_name() -> None:
    assert NOT_OVER_HTTP.keys() <= UNSUPPORTED.keys()
    assert not NOT_OVER_HTTP.keys() & set(SamplingFields.__struct_fields__)


def parse(line: dict[str, Any]) -> Any:
    return LineParser({}, seed=0, model_name="m").parse(InputLine(0, 0, json.dumps(line).encode()))


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in NOT_IN_A_LINE])
def test_every_parameter_is_read_from_a_plain_line_and_from_a_batch_line(name: str) -> None:
    assert name in SAMPLING_FIELDS
    body = {"prompt": "a", name: VALUES[name], **NEEDS.get(name, {})}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    for parsed in (parse(body), parse(batch)):
        assert isinstance(parsed, LineRequest), parsed
        assert getattr(parsed.params, name) == as_given(name)


def test_a_parameter_that_is_not_in_a_line_is_refused_by_its_name() -> None:
    assert NOT_IN_A_LINE.keys() <= UNSUPPORTED.keys() | NOT_IN_BATCH.keys()
    assert not NOT_IN_A_LINE.keys() & SAMPLING_FIELDS


def test_every_parameter_is_a_flag_or_listed_with_a_reason() -> None:
    assert FLAGS.keys() | NOT_A_FLAG.keys() == set(FIELDS)
    assert not FLAGS.keys() & NOT_A_FLAG.keys()


def test_every_parameter_is_on_the_page_of_the_api() -> None:
    assert set(FIELDS) <= set(re.findall(r"`(\w+)`", PAGE))
