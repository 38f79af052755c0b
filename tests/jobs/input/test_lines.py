"""Each way in which a line can be good or bad."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.fields import SAMPLING_FIELDS, UNSUPPORTED_SAMPLING
from headrace.jobs.input.lines import BadLine, LineParser, LineRequest
from headrace.jobs.input.reply import JobFacts
from headrace.openai.fields import LABELS, NOT_IN_BATCH, UNSUPPORTED
from headrace.types import SamplingParams, StructuredOutputs

FACTS = JobFacts("fake", None)


def parse(line: Any, *, index: int = 0, **defaults: Any) -> LineRequest | BadLine:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return LineParser(defaults, seed=0, model_name="fake").parse(InputLine(index, 0, data))


def good(line: Any, **options: Any) -> LineRequest:
    parsed = parse(line, **options)
    assert isinstance(parsed, LineRequest), parsed
    return parsed


def bad(line: Any, **options: Any) -> BadLine:
    parsed = parse(line, **options)
    assert isinstance(parsed, BadLine), parsed
    return parsed


def error_line(line: Any, index: int = 6) -> dict[str, Any]:
    parsed = bad(line, index=index)
    written: dict[str, Any] = json.loads(parsed.reply.error(parsed.error, FACTS))
    return written


def chat(**body: Any) -> dict[str, Any]:
    return envelope("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], **body)


def completion(**body: Any) -> dict[str, Any]:
    return envelope("/v1/completions", **{"prompt": "Hi", **body})


def envelope(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "one", "method": "POST", "url": url, "body": body}


# Plain lines.


def test_a_plain_prompt_is_read_with_its_sampling() -> None:
    request = good({"prompt": "Hi", "max_tokens": 5, "temperature": 0, "stop": "x", "seed": 9})
    assert request.prompt == "Hi"
    assert request.messages is None
    assert request.params == SamplingParams(max_tokens=5, temperature=0, stop="x", seed=9)


def test_plain_messages_are_read_with_template_options() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    request = good({"messages": messages, "chat_template_kwargs": {"thinking": False}})
    assert request.messages == messages
    assert request.template_options == {"thinking": False}


def test_token_ids_are_a_prompt() -> None:
    assert good({"prompt": [1, 2, 3]}).prompt == [1, 2, 3]
    assert good(completion(prompt=[[1, 2, 3]])).prompt == [1, 2, 3]


def test_a_list_of_one_text_is_that_text() -> None:
    assert good(completion(prompt=["Hi"])).prompt == "Hi"


def test_other_fields_are_copied_and_clashing_ones_go_under_input() -> None:
    request = good({"prompt": "Hi", "id": 7, "text": "mine", "nested": {"a": [1]}, "max_tokens": 3})
    assert json.loads(request.reply.error(RequestError("no", param="p", code="c"), FACTS)) == {
        "index": 0,
        "line": 1,
        "id": 7,
        "nested": {"a": [1]},
        "input": {"text": "mine"},
        "error": {"code": "c", "message": "line 1: no", "param": "p"},
    }


@pytest.mark.parametrize("names", [["line", "error", "text", "usage"], ["usage", "text", "error", "line"]])
def test_fields_under_input_keep_the_order_of_the_line(names: list[str]) -> None:
    line = {"prompt": "Hi", **dict.fromkeys(names, 1), "max_tokens": 0}
    assert list(error_line(line)["input"]) == names


def test_a_plain_line_may_have_a_field_called_body() -> None:
    assert good({"prompt": "Summarise", "body": "an email"}).prompt == "Summarise"


@pytest.mark.parametrize("name", ["temprature", "maxTokens", "max-tokens", "top_P"])
def test_a_copied_field_that_looks_like_a_parameter_is_noted(name: str) -> None:
    (note,) = good({"prompt": "Hi", name: 1}).notes
    assert note.startswith(f"field {name!r} sets nothing") and "did you mean" in note


@pytest.mark.parametrize("name", ["topic", "label", "id", "title", "category", "language", "tokens", "text"])
def test_an_ordinary_field_is_copied_without_a_note(name: str) -> None:
    assert good({"prompt": "Hi", name: 1}).notes == ()


# What lines leave open.


def test_defaults_are_for_fields_that_a_line_does_not_give() -> None:
    request = good({"prompt": "Hi", "temperature": 0.5}, temperature=0.1, max_tokens=7)
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 7)


def test_null_means_not_given() -> None:
    assert good({"prompt": "Hi", "max_tokens": None, "stop": None}, max_tokens=7).params.max_tokens == 7


@pytest.mark.parametrize(
    "line, max_tokens",
    [
        (chat(), None),
        (completion(), 16),
        ({"prompt": "Hi"}, 256),
        ({"messages": [{"role": "user", "content": ""}]}, None),
    ],
)
def test_the_longest_answer_depends_on_the_kind_of_line(line: dict[str, Any], max_tokens: int | None) -> None:
    assert good(line).params.max_tokens == max_tokens


def test_the_seed_of_a_line_depends_on_its_index_alone() -> None:
    first, again, second = (good({"prompt": "Hi"}, index=index).seed for index in (3, 3, 4))
    assert first == again != second


# OpenAI's lines.


def test_a_chat_line_is_read() -> None:
    request = good(chat(max_completion_tokens=9, temperature=0.2, top_p=0.9, n=2, stop=["a", "b"], top_k=5, min_p=0.1))
    expected = {"max_tokens": 9, "temperature": 0.2, "top_p": 0.9, "n": 2, "stop": ("a", "b"), "top_k": 5, "min_p": 0.1}
    assert {name: getattr(request.params, name) for name in expected} == expected


def test_vllms_extras_are_read() -> None:
    extras = {
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    params = good(chat(**extras, cache_salt="a")).params
    assert {name: getattr(params, name) for name in extras} == {**extras, "stop_token_ids": (5,)}
    assert good(chat(cache_salt="a")).cache_salt == "a"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({}, None),
    ],
)
def test_a_plain_line_gives_logprobs_in_either_form(given: dict[str, Any], expected: int | None) -> None:
    assert good({"prompt": "Hi", **given}).params.logprobs == expected


def test_an_openai_line_gives_logprobs_in_the_form_of_its_endpoint() -> None:
    assert good(chat(logprobs=True, top_logprobs=5)).params.logprobs == 5
    assert good(completion(logprobs=3)).params.logprobs == 3
    assert bad(chat(logprobs=3)).error.code == bad(completion(logprobs=True)).error.code == "invalid_type"


def test_labels_and_neutral_values_pass() -> None:
    refused = {**UNSUPPORTED, **NOT_IN_BATCH}
    neutral = {name: values[0] for name, values in refused.items() if values}
    assert good(chat(**neutral, **dict.fromkeys(LABELS, "x"))).params.n == 1
    assert good(chat(**dict.fromkeys(refused))).params.n == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("tools", [{"type": "function"}]),
        ("echo", True),
        ("priority", 1),
        ("suffix", "end"),
        ("chat_template", "{{ x }}"),
        ("truncate_prompt_tokens", 5),
        ("detokenize", False),
        ("add_special_tokens", False),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("return_token_ids", True),
        ("logits_processors", ["x"]),
        ("functions", [{}]),
    ],
)
def test_a_plain_line_refuses_a_parameter_that_it_cannot_have(name: str, value: Any) -> None:
    refused = bad({"prompt": "Hi", name: value}).error
    assert (refused.code, refused.param) == ("unsupported_parameter", name)
    assert name not in error_line({"prompt": "Hi", name: value})


def test_a_plain_line_may_give_null_or_what_happens_anyway() -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED_SAMPLING.items() if values}
    assert good({"prompt": "Hi", **neutral, "add_special_tokens": True}).prompt == "Hi"
    assert good({"messages": [{"role": "user"}], **neutral, "add_special_tokens": False}).messages
    assert good({"prompt": "Hi", **dict.fromkeys(UNSUPPORTED_SAMPLING)}).prompt == "Hi"


def test_a_plain_line_copies_names_that_may_be_data() -> None:
    line = error_line({"prompt": "Hi", "documents": ["a"], "store": "Berlin", "max_tokens": 0})
    assert (line["documents"], line["store"]) == (["a"], "Berlin")


def test_a_plain_line_reads_the_salt_and_the_effort_as_openai_lines_do() -> None:
    own = {"cache_salt": "tenant", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    plain, batch = good({"messages": [{"role": "user", "content": "Hi"}], **own}), good(chat(**own))
    assert plain.cache_salt == batch.cache_salt == "tenant"
    assert plain.template_options == batch.template_options == {"a": 1, "reasoning_effort": "low"}
    assert good({"prompt": "Hi", "cache_salt": "tenant"}).cache_salt == "tenant"
    assert good({"prompt": "Hi", "chat_template_kwargs": {}}).template_options == {}


@pytest.mark.parametrize(
    "given, param",
    [
        ({"prompt": "Hi", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [{"role": "user"}], "reasoning_effort": 3}, "reasoning_effort"),
        ({"prompt": "Hi", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"prompt": "Hi", "cache_salt": 3}, "cache_salt"),
        ({"prompt": "Hi", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_bad_salt_or_template_variable_of_a_plain_line_is_refused(given: dict[str, Any], param: str) -> None:
    assert bad(given).error.param == param


def test_no_parameter_is_both_supported_and_refused() -> None:
    assert not SAMPLING_FIELDS & (UNSUPPORTED.keys() | NOT_IN_BATCH.keys() | UNSUPPORTED_SAMPLING.keys())


def parse_all(*lines: Any) -> list[LineRequest | BadLine]:
    """With one parser, which remembers what it has checked."""
    parser = LineParser({}, seed=0, model_name="fake")
    return [parser.parse(InputLine(index, 0, json.dumps(line).encode())) for index, line in enumerate(lines)]


@pytest.mark.parametrize("given", [{"stop": ["a"]}, {"logit_bias": {"5": 1.0}}, {"temperature": 0.5}])
def test_lines_with_equal_values_share_their_parameters(given: dict[str, Any]) -> None:
    first, second = parse_all(chat(**given), chat(**given))
    assert isinstance(first, LineRequest) and isinstance(second, LineRequest)
    assert first.params is second.params


@pytest.mark.parametrize("name, first, second", [("n", 1, True), ("n", 1, 1.5), ("stop_token_ids", [1], [True])])
def test_a_value_that_equals_a_good_one_is_refused_for_its_type(name: str, first: Any, second: Any) -> None:
    lines = parse_all(chat(**{name: first}), chat(**{name: second}), chat(**{name: first}))
    assert [type(line) for line in lines] == [LineRequest, BadLine, LineRequest]


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"stop": ["a"]}])
def test_lines_with_seeds_of_their_own_differ_in_nothing_else(more: dict[str, Any]) -> None:
    lines = parse_all(*(chat(seed=seed, **more) for seed in (3, -(2**63), 2**64 - 1)))
    seeds = [3, -(2**63), 2**64 - 1]
    expected = [SamplingParams(seed=seed, max_tokens=None, **more) for seed in seeds]
    assert [line.params for line in lines if isinstance(line, LineRequest)] == expected


@pytest.mark.parametrize("seed", [True, 1.5, "1", 2**64, -(2**63) - 1])
def test_a_bad_seed_is_refused_after_good_ones(seed: Any) -> None:
    good_line, bad_line = parse_all(chat(seed=1), chat(seed=seed))
    assert isinstance(good_line, LineRequest) and isinstance(bad_line, BadLine)
    assert bad_line.error.param == "seed"


def test_messages_are_checked_on_every_line() -> None:
    lines = parse_all(chat(n=2), envelope("/v1/chat/completions", messages=["Hi"], n=2), chat(n=2))
    assert [type(line) for line in lines] == [LineRequest, BadLine, LineRequest]


def test_openais_penalties_and_biases_are_read_with_token_ids_as_text() -> None:
    params = good(chat(presence_penalty=0.5, frequency_penalty=-1, logit_bias={"17": -100, "5": 2.5})).params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
    assert params.logit_bias == {17: -100.0, 5: 2.5}


def test_another_model_is_noted_and_answered() -> None:
    assert good(chat(model="gpt-4o-mini")).notes == ("model 'gpt-4o-mini' was asked for, 'fake' answered",)
    assert good(chat(model="fake")).notes == ()


def test_constraints_are_read_in_the_forms_of_openai_and_vllm() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    described = {"name": "thing", "strict": True, "schema": schema, "description": "a thing"}
    of_schema = StructuredOutputs(json=schema)
    assert good(chat(response_format={"type": "text"})).params.structured_outputs is None
    any_object = good(chat(response_format={"type": "json_object"})).params.structured_outputs
    assert any_object == StructuredOutputs(json_object=True)
    as_openai = good(chat(response_format={"type": "json_schema", "json_schema": described})).params.structured_outputs
    assert as_openai == of_schema
    assert isinstance(as_openai, StructuredOutputs) and as_openai.asked_as == "response_format"
    assert good(completion(structured_outputs={"json": schema})).params.structured_outputs == of_schema
    assert good({"prompt": "a", "structured_outputs": {"regex": "a+"}}).params.structured_outputs == StructuredOutputs(
        regex="a+"
    )


# Bad lines: the code, and a part of the message.

BAD_LINES: dict[str, tuple[Any, str, str]] = {
    "cut off": (b'{"prompt": "Hi', "invalid_json", "invalid JSON: Unterminated string"),
    "tab in a text": (b'{"prompt": "a\tb"}', "invalid_json", "Invalid control character at column 14"),
    "not JSON": (b"hello", "invalid_json", "column 1"),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "Extra data"),
    "not a number": (b'{"prompt": "a", "seed": NaN}', "invalid_json", "invalid JSON"),
    "too large a number": (b'{"prompt": "a", "top_p": 1e999}', "invalid_json", "out of range"),
    "half a character": (b'{"prompt": "\\ud800"}', "invalid_json", "lone surrogate"),
    "nested": (b"[" * 100_000, "invalid_json", "nested too deeply"),
    "not UTF-8": (b'{"prompt": "\xff"}', "invalid_utf8", "invalid UTF-8 at byte 13"),
    "a list": ([1], "invalid_json", "must be a JSON object, got a list"),
    "text": ("hello", "invalid_json", "got text"),
    "null": (None, "invalid_json", "got null"),
    "empty": ({}, "missing_prompt", "no prompt"),
    "only an id": ({"custom_id": "a"}, "missing_prompt", "no prompt"),
    "prompt null": ({"prompt": None}, "missing_prompt", "prompt is missing"),
    "messages null": ({"messages": None}, "missing_prompt", "messages are missing"),
    "prompt a number": ({"prompt": 5}, "invalid_request", "got a number"),
    "prompt of fractions": ({"prompt": [1, 2.5]}, "invalid_request", "text or a list of token ids"),
    "many prompts": ({"prompt": ["a", "b"]}, "invalid_request", "2 prompts in one line"),
    "prompt and messages": ({"prompt": "a", "messages": [{"role": "user"}]}, "invalid_request", "both given"),
    "messages text": ({"messages": "Hi"}, "invalid_request", "messages must be a list"),
    "messages empty": ({"messages": []}, "invalid_request", "at least one message"),
    "template options": ({"messages": [{}], "chat_template_kwargs": 1}, "invalid_request", "must be an object"),
    "temperature text": (
        {"prompt": "a", "temperature": "hot"},
        "invalid_type",
        "temperature must be a number, got text",
    ),
    "temperature low": ({"prompt": "a", "temperature": -1}, "invalid_request", "between 0"),
    "max_tokens zero": ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens must be at least 1"),
    "two maxima": ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "invalid_request", "mean the same"),
    "stop a number": ({"prompt": "a", "stop": 5}, "invalid_type", "stop must be text or a list, got an integer"),
    "stop of numbers": ({"prompt": "a", "stop": [5]}, "invalid_type", "stop[0] must be text"),
    "stop ids text": ({"prompt": "a", "stop_token_ids": "5"}, "invalid_type", "must be a list"),
    "ignore_eos text": ({"prompt": "a", "ignore_eos": "yes"}, "invalid_type", "true or false"),
    "too many answers": ({"prompt": "a", "n": 1000}, "invalid_request", "between 1 and 128"),
    "top_logprobs alone": ({"prompt": "a", "top_logprobs": 2}, "invalid_request", "needs logprobs"),
    "more logprobs than an API gives": ({"prompt": "a", "logprobs": 21}, "invalid_request", "between 0 and 20, got 21"),
    "logprobs of the whole vocabulary": ({"prompt": "a", "logprobs": -1}, "invalid_request", "between 0 and 20"),
    "logprobs text": (
        {"prompt": "a", "logprobs": "yes"},
        "invalid_type",
        "logprobs must be true or false or",
    ),
    "a penalty too large": ({"prompt": "a", "presence_penalty": 3}, "invalid_request", "between -2 and 2, got 3"),
    "a bias of no token": (
        chat(logit_bias={"a": 1}),
        "invalid_request",
        "the keys of logit_bias must be token ids, got a",
    ),
    "a bias too large": (chat(logit_bias={"5": 200}), "invalid_request", "between -100 and 100, got 200"),
    "a list of biases": (chat(logit_bias=[5]), "invalid_type", "logit_bias must be an object, got a list"),
    "no allowed tokens": ({"prompt": "a", "allowed_token_ids": []}, "invalid_request", "at least one token id"),
    "bad words a number": ({"prompt": "a", "bad_words": 5}, "invalid_type", "bad_words must be a list, got an integer"),
    "prompt_logprobs": (
        {"prompt": "a", "prompt_logprobs": 1},
        "unsupported_parameter",
        "is not supported",
    ),
    "sampling_params": ({"prompt": "a", "sampling_params": {}}, "unsupported_parameter", "beside the prompt"),
    "no custom_id": ({**chat(), "custom_id": None}, "invalid_line", "custom_id must be a non-empty text"),
    "custom_id a number": ({**chat(), "custom_id": 5}, "invalid_line", "got 5"),
    "method": ({**chat(), "method": "GET"}, "invalid_line", "method must be 'POST'"),
    "url": ({**chat(), "url": "/v1/images"}, "invalid_line", "url must be /v1/chat/completions, /v1/completions"),
    "url a list": ({**chat(), "url": ["a"]}, "invalid_line", "url must be"),
    "url misspelt": ({**chat(), "url": "/v1/chat/completion"}, "invalid_line", "did you mean '/v1/chat/completions'"),
    "body text": ({**chat(), "body": "Hi"}, "invalid_line", "body must be an object"),
    "no body": ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "invalid_line", "body must be"),
    "envelope": ({**chat(), "priority": 1}, "invalid_line", "unknown field 'priority'"),
    "stream": (chat(stream=True), "unsupported_parameter", "not supported (a batch job writes whole answers)"),
    "tools": (chat(tools="weather"), "invalid_type", "tools must be a list, got text"),
    "tools of a prompt": (
        {"prompt": "Hi", "tools": [{}]},
        "unsupported_parameter",
        "a plain line is answered with text; lines of OpenAI's batch format have it",
    ),
    "tool_choice": (chat(tool_choice="required"), "invalid_request", "tool_choice needs tools"),
    "format text": (chat(response_format="json"), "invalid_type", "response_format must be an object, got text"),
    "format misspelt": (chat(response_format={"type": "json_objct"}), "invalid_request", "did you mean 'json_object'"),
    "format without schema": (chat(response_format={"type": "json_schema"}), "invalid_request", "needs json_schema"),
    "format with more": (chat(response_format={"type": "text", "x": 1}), "invalid_request", "unknown field 'x'"),
    "schema in the wrong place": (
        chat(response_format={"type": "json_schema", "json_schema": {"type": "object"}}),
        "invalid_request",
        "unknown field 'json_schema.type'",
    ),
    "schema a list": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": []}}),
        "invalid_request",
        "json_schema.schema must be an object",
    ),
    "two structures": (chat(structured_outputs={"regex": "a", "choice": ["a"]}), "invalid_request", "exactly one"),
    "both structures": (
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "invalid_request",
        "both given",
    ),
    "structure misspelt": (chat(structured_outputs={"regx": "a"}), "invalid_request", "did you mean 'regex'"),
    "guided": (chat(guided_json={}), "unsupported_parameter", "structured_outputs"),
    "unknown": (chat(temprature=1), "unknown_parameter", "unknown parameter 'temprature', did you mean 'temperature'?"),
    "chat without messages": (envelope("/v1/chat/completions"), "missing_parameter", "messages is missing"),
    "chat with a prompt": (chat(prompt="a"), "unknown_parameter", "unknown parameter 'prompt'"),
    "completion without a prompt": (envelope("/v1/completions"), "missing_parameter", "prompt is missing"),
    "echo": (completion(echo=True), "unsupported_parameter", "echo is not supported; leave it out or set it to false"),
    "cache_salt": (chat(cache_salt=5), "invalid_type", "cache_salt must be text"),
}


@pytest.mark.parametrize("line, code, message", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_becomes_an_error_with_a_code_and_a_reason(line: Any, code: str, message: str) -> None:
    error = bad(line).error
    assert error.code == code
    assert message in str(error)


@pytest.mark.parametrize("line", [entry[0] for entry in BAD_LINES.values()], ids=BAD_LINES.keys())
def test_every_error_line_names_the_line_number(line: Any) -> None:
    assert '"line 7: ' in json.dumps(error_line(line, index=6))


def test_an_over_long_line_is_an_error() -> None:
    parsed = LineParser({}, seed=0, model_name="fake").parse(InputLine(0, 0, b"{", is_too_long=True))
    assert isinstance(parsed, BadLine)
    assert parsed.error.code == "line_too_long"


def test_an_unreadable_line_has_the_keys_of_both_formats() -> None:
    line = error_line(b"{")
    assert line["custom_id"] is None and line["response"] is None and line["id"].startswith("batch_req_")
    assert (line["index"], line["line"], line["error"]["code"]) == (6, 7, "invalid_json")


def test_a_refused_openai_request_is_a_400_with_an_error_body() -> None:
    line = error_line(chat(temperature=-1))
    assert line["custom_id"] == "one" and line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "line 7: temperature must be between 0 and 10000, got -1.0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    }


@pytest.mark.parametrize("given", [17, 10**30, 1.5, True, ["a"], {"a": 1}, ""])
def test_an_id_that_is_not_text_is_in_its_error_line(given: Any) -> None:
    line = error_line({**chat(), "custom_id": given})
    assert line["error"]["code"] == "invalid_line"
    assert line["custom_id"] == given
    assert type(line["custom_id"]) is type(given)


def test_a_broken_envelope_has_no_response() -> None:
    line = error_line({**chat(), "method": "GET"})
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["custom_id"] == "one" and line["response"] is None
    assert line["error"] == {"code": "invalid_line", "message": "line 7: method must be 'POST', got 'GET'"}
