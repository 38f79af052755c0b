"""Output lines, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import RequestError
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.openai_lines import Endpoint, OpenAIReply
from headrace.jobs.input.plain_lines import PlainReply, as_members
from headrace.jobs.input.reply import ENGINE_ERROR, JobFacts, Reply
from headrace.text import Tokenizer
from headrace.types import TokenLogprobs

LOGPROBS = (
    TokenLogprobs(72, -0.5, 1, (72, 104), (-0.5, -1.5)),
    TokenLogprobs(105, float("-inf"), 2, (106, 105), (-0.25, float("-inf"))),
)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def output(num_answers: int = 1, logprobs: tuple[TokenLogprobs, ...] | None = None) -> LineOutput:
    answers = [LineAnswer(index, "Hi", 2, "stop", logprobs) for index in range(num_answers)]
    return LineOutput(3, tuple(answers), num_cached_tokens=1)


def answer(reply: Reply, result: LineOutput, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """As a reader of the file sees it."""
    decoded: dict[str, Any] = msgspec.json.decode(reply.answer(result, JobFacts("m", tokenizer)))
    return decoded


def body_of(line: dict[str, Any]) -> dict[str, Any]:
    assert line.keys() == {"id", "custom_id", "response", "error"}
    assert line["error"] is None
    response = line["response"]
    assert response.keys() == {"status_code", "request_id", "body"}
    assert response["status_code"] == 200
    body: dict[str, Any] = response["body"]
    return body


def test_a_chat_completion_has_every_field_of_openais() -> None:
    line = answer(OpenAIReply(4, "one", "/v1/chat/completions"), output())
    body = body_of(line)
    assert line["custom_id"] == "one"
    assert line["id"].startswith("batch_req_")
    assert line["response"]["request_id"].startswith("req_")
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": USAGE,
        "system_fingerprint": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }


def test_a_text_completion_has_every_field_of_openais() -> None:
    body = body_of(answer(OpenAIReply(4, "one", "/v1/completions"), output()))
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "Hi",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
        "usage": USAGE,
        "system_fingerprint": None,
    }


def test_several_answers_are_several_choices_and_usage_counts_all() -> None:
    body = body_of(answer(OpenAIReply(0, "one", "/v1/chat/completions"), output(3)))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (6, 9)


def test_chat_logprobs_are_entries_with_bytes(tokenizer: Tokenizer) -> None:
    body = body_of(answer(OpenAIReply(0, "one", "/v1/chat/completions"), output(logprobs=LOGPROBS), tokenizer))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"] == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [72]},
                {"token": "h", "logprob": -1.5, "bytes": [104]},
            ],
        },
        {
            "token": "i",
            "logprob": -9999.0,
            "bytes": [105],
            "top_logprobs": [
                {"token": "j", "logprob": -0.25, "bytes": [106]},
                {"token": "i", "logprob": -9999.0, "bytes": [105]},
            ],
        },
    ]


def test_completion_logprobs_are_four_lists(tokenizer: Tokenizer) -> None:
    body = body_of(answer(OpenAIReply(0, "one", "/v1/completions"), output(logprobs=LOGPROBS), tokenizer))
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"H": -0.5, "h": -1.5}, {"j": -0.25, "i": -9999.0}],
        "text_offset": [0, 1],
    }


def test_completion_top_logprobs_include_a_chosen_token_that_is_not_among_the_most_likely(tokenizer: Tokenizer) -> None:
    chosen = (TokenLogprobs(105, -3.0, 9, (72, 104), (-0.5, -1.5)),)
    body = body_of(answer(OpenAIReply(0, "one", "/v1/completions"), output(logprobs=chosen), tokenizer))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -0.5, "h": -1.5, "i": -3.0}]


def test_parts_of_characters_are_different_tokens_in_the_lists_of_a_completion(tokenizer: Tokenizer) -> None:
    chosen = (
        TokenLogprobs(0xE2, -0.5, 1, (0xE2, 0xC3, 72), (-0.5, -1.5, -2.5)),
        TokenLogprobs(72, -0.5, 1, (72,), (-0.5,)),
    )
    body = body_of(answer(OpenAIReply(0, "one", "/v1/completions"), output(logprobs=chosen), tokenizer))
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [r"bytes:\xe2", "H"]
    assert logprobs["top_logprobs"] == [{r"bytes:\xe2": -0.5, r"bytes:\xc3": -1.5, "H": -2.5}, {"H": -0.5}]
    assert logprobs["text_offset"] == [0, 1]  # one replacement mark in the text


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("reason", ["END", 17])
def test_the_stop_string_or_token_is_named(endpoint: Endpoint, reason: str | int) -> None:
    stopped = LineOutput(3, (LineAnswer(0, "Hi", 2, "stop", stop_reason=reason),))
    assert body_of(answer(OpenAIReply(0, "one", endpoint), stopped))["choices"][0]["stop_reason"] == reason


def test_a_plain_answer_has_its_text_and_the_copied_fields() -> None:
    line = answer(PlainReply(4, as_members({"id": 7})), output())
    assert line == {"index": 4, "id": 7, "text": "Hi", "finish_reason": "stop", "usage": USAGE}
    assert list(line) == ["index", "id", "text", "finish_reason", "usage"]


def test_several_plain_answers_are_outputs() -> None:
    line = answer(PlainReply(4), output(2))
    assert line["outputs"] == [{"text": "Hi", "finish_reason": "stop"}] * 2
    assert "text" not in line


@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_is_compact_json_whatever_its_texts_are(
    endpoint: Endpoint, logprobs: tuple[TokenLogprobs, ...] | None
) -> None:
    texts = ('"quoted" \\ %d %b', "\x00\n\u2028é😀")
    result = LineOutput(3, tuple(LineAnswer(i, text, 2, None, logprobs) for i, text in enumerate(texts)), 1)
    line = OpenAIReply(4, 'a "b" é %s', endpoint).answer(result, JobFacts('m "%d" é', None, 'job"id'))
    decoded = msgspec.json.decode(line)
    assert msgspec.json.encode(decoded) == line
    assert decoded["custom_id"] == 'a "b" é %s'
    assert decoded["id"] == 'batch_req_job"id-4'
    assert decoded["response"]["body"]["model"] == 'm "%d" é'
    choices = decoded["response"]["body"]["choices"]
    assert tuple(choice.get("text") or choice["message"]["content"] for choice in choices) == texts


def test_a_failure_of_the_engine_is_a_500() -> None:
    reply = OpenAIReply(0, "one", "/v1/chat/completions")
    line = msgspec.json.decode(reply.error(RequestError("broken", code=ENGINE_ERROR), JobFacts("m", None)))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("kind", ["batch_req_", "req_"])
def test_ids_differ_between_lines_and_between_jobs(kind: str) -> None:
    jobs = [JobFacts("m", None) for _ in range(2)]
    assert len({facts.id_of(kind, index) for facts in jobs for index in range(3)}) == 6
