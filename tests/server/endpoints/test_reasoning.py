"""Reasoning in chat answers, whole and in chunks, with templates that show each way to start it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from headrace.server.options import ServerOptions
from headrace.types import ReasoningSpan, StructuredOutputs
from tests.engine.tiny import save_tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}{{ tools }}<a>"
HYBRID = TURNS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINKING = TURNS + "<think>\n"
HARMONY = TURNS + "{# <|channel|> <|message|> #}"
MISTRAL = TURNS + "{# [THINK] [TOOL_CALLS] #}"
ANSWER = "<think>\nLet me see.\n</think>\n\nRome."
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}


def model(directory: Path, template: str, tokens: Sequence[str] = ("<think>", "</think>"), *, special: bool) -> Path:
    save_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(str(path))
    config = {"eos_token": "<eos>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class Asked:
    """The answer to a chat if the model outputs these texts, and the request that it was given."""

    def __init__(self, directory: Path, texts: Sequence[str], body: dict[str, Any], **options: Any) -> None:
        fake = FakeEngine(directory)
        with serving(start=fake, options=ServerOptions(**options)) as server:

            def speak() -> None:
                server.wait_until(lambda: bool(fake.client.requests))
                for place, text in enumerate(texts):
                    fake.client.send(text, reason="stop" if place == len(texts) - 1 else None)

            thread = threading.Thread(target=speak)
            thread.start()
            given = {"messages": MESSAGES, **body}
            self.chunks = server.chunks(CHAT, given) if body.get("stream") else []
            self.body = {} if body.get("stream") else server.post(CHAT, given).json()
            thread.join()
        (self.request,) = fake.client.requests
        self.prompt = fake.client.tokenizer.decode(self.request.prompt_token_ids, False)

    @property
    def message(self) -> dict[str, Any]:
        (choice,) = self.body["choices"]
        message: dict[str, Any] = choice["message"]
        return message

    def said(self, name: str) -> str:
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(delta.get(name) or "" for delta in deltas)


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return model(tmp_path, HYBRID, special=False)


def test_reasoning_is_told_apart_from_the_content(hybrid: Path) -> None:
    asked = Asked(hybrid, [ANSWER], {})
    assert asked.message["content"] == "Rome."
    assert asked.message["reasoning"] == asked.message["reasoning_content"] == "Let me see."
    assert asked.body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Let me see.")}


def test_reasoning_is_streamed_and_no_part_of_a_tag_is_shown(hybrid: Path) -> None:
    asked = Asked(hybrid, list(ANSWER), {"stream": True, "stream_options": {"include_usage": True}})
    assert asked.said("reasoning") == asked.said("reasoning_content") == "Let me see."
    assert asked.said("content") == "Rome."
    assert asked.chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me see.")


def test_an_answer_without_reasoning_has_null_in_its_place(hybrid: Path) -> None:
    asked = Asked(hybrid, ["Rome."], {})
    assert asked.message["content"] == "Rome."
    assert asked.message["reasoning"] is None and asked.message["reasoning_content"] is None


def test_an_answer_that_is_cut_inside_its_reasoning_has_no_content(hybrid: Path) -> None:
    asked = Asked(hybrid, ["<think>Let me"], {})
    assert (asked.message["content"], asked.message["reasoning"]) == (None, "Let me")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_on_request_with_all_that_would_show_it(hybrid: Path, stream: bool) -> None:
    body = {"include_reasoning": False, "logprobs": True, "return_token_ids": True, "stream": stream}
    asked = Asked(hybrid, [ANSWER], body)
    assert "see" not in json.dumps(asked.body) + json.dumps(asked.chunks)
    if stream:
        assert asked.said("content") == "Rome."
    else:
        assert asked.message["content"] == "Rome." and asked.message["reasoning"] is None
        assert asked.body["choices"][0]["logprobs"] is None and asked.body["choices"][0]["token_ids"] is None


def test_a_template_that_opens_the_tag_starts_the_answer_inside(tmp_path: Path) -> None:
    asked = Asked(model(tmp_path, THINKING, special=False), ["Let me see.\n</think>\n\nRome."], {})
    assert (asked.message["reasoning"], asked.message["content"]) == ("Let me see.", "Rome.")


def test_thinking_that_is_disabled_makes_the_answer_content(hybrid: Path) -> None:
    asked = Asked(hybrid, ["<think> is a tag."], {"chat_template_kwargs": {"enable_thinking": False}})
    assert asked.prompt.endswith("</think>\n\n")
    assert (asked.message["reasoning"], asked.message["content"]) == (None, "<think> is a tag.")


@pytest.mark.parametrize(("effort", "is_on"), [("none", False), ("low", True)])
def test_reasoning_effort_turns_thinking_on_and_off(hybrid: Path, effort: str, is_on: bool) -> None:
    asked = Asked(hybrid, ["Rome."], {"reasoning_effort": effort})
    assert asked.prompt.endswith("<a>" if is_on else "</think>\n\n")


def test_a_message_that_is_continued_inside_its_reasoning_stays_inside(hybrid: Path) -> None:
    last = {"role": "assistant", "content": "<think>Let me"}
    asked = Asked(hybrid, [" see.</think>Rome."], {"messages": [*MESSAGES, last], "continue_final_message": True})
    assert (asked.message["reasoning"], asked.message["content"]) == ("see.", "Rome.")


def test_the_parser_can_be_named_or_turned_off(hybrid: Path) -> None:
    assert Asked(hybrid, [ANSWER], {}, reasoning_parser="none").message["content"] == ANSWER
    message = Asked(hybrid, ["Let me see.</think>Rome."], {}, reasoning_parser="deepseek_r1").message
    assert (message["reasoning"], message["content"]) == ("Let me see.", "Rome.")


def test_calls_follow_reasoning(hybrid: Path) -> None:
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    for texts in ([f"<think>Hm.</think>\n\n{call}"], list(f"<think>Hm.\n{call}")):
        asked = Asked(hybrid, texts, {"tools": [PING]})
        assert (asked.message["reasoning"], asked.message["content"]) == ("Hm.", None)
        assert asked.message["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
        assert asked.body["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_tags_that_are_special_tokens_are_read(tmp_path: Path, stream: bool) -> None:
    directory = model(tmp_path, MISTRAL, ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"), special=True)
    asked = Asked(directory, ["[THINK]", "Hm.", "[/THINK]", "[TOOL_CALLS]ping", "[ARGS]{}"],
        {"tools": [PING], "stream": stream})  # fmt: skip
    if stream:
        assert (asked.said("reasoning"), asked.said("content")) == ("Hm.", "")
    else:
        assert (asked.message["reasoning"], asked.message["content"]) == ("Hm.", None)
        assert asked.message["tool_calls"][0]["function"]["name"] == "ping"


def test_channels_of_gpt_oss_are_read(tmp_path: Path) -> None:
    tokens = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>")
    directory = model(tmp_path, HARMONY, tokens, special=True)
    reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    asked = Asked(directory, [reasoning + "final<|message|>Rome."], {})
    assert (asked.message["reasoning"], asked.message["content"]) == ("Hm.", "Rome.")
    call = f"{reasoning}commentary to=functions.ping <|constrain|>json<|message|>{{}}"
    asked = Asked(directory, [call], {"tools": [PING]})
    assert asked.message["tool_calls"][0]["function"] == {"name": "ping", "arguments": "{}"}
    assert (asked.message["reasoning"], asked.message["content"]) == ("Hm.", None)


@pytest.mark.parametrize(
    ("template", "body", "starts"),
    [
        (HYBRID, {}, "token"),
        (HYBRID, {"chat_template_kwargs": {"enable_thinking": False}}, "never"),
        (THINKING, {}, "inside"),
        (HYBRID, {"tools": [PING], "tool_choice": "required"}, "token"),
    ],
)
def test_a_grammar_starts_after_the_reasoning(tmp_path: Path, template: str, body: Any, starts: str) -> None:
    directory = model(tmp_path, template, special=False)
    form = {} if "tools" in body else {"response_format": {"type": "json_object"}}
    request = Asked(directory, ["{}"], {**form, **body}).request
    outputs = request.params.structured_outputs
    assert isinstance(outputs, StructuredOutputs)
    token = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<think>")
    spans = {"token": ReasoningSpan(("</think>",), token), "inside": ReasoningSpan(("</think>",)), "never": None}
    assert outputs.reasoning == spans[starts]


def test_a_thinking_token_budget_limits_the_reasoning_alone(hybrid: Path) -> None:
    outputs = Asked(hybrid, [ANSWER], {"thinking_token_budget": 7}).request.params.structured_outputs
    assert isinstance(outputs, StructuredOutputs) and outputs.is_any
    ids = Tokenizer.from_file(str(hybrid / "tokenizer.json")).token_to_id
    assert outputs.reasoning == ReasoningSpan(("</think>",), ids("<think>"), 7, (ids("</think>"),))


@pytest.mark.parametrize("body", [{"thinking_token_budget": -1}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_without_a_limit_or_reasoning_a_budget_changes_nothing(hybrid: Path, body: dict[str, Any]) -> None:
    asked = Asked(hybrid, ["Rome."], {"thinking_token_budget": 7, **body})
    assert asked.request.params.structured_outputs is None


@pytest.mark.parametrize(
    ("template", "budget", "message"),
    [(HYBRID, -2, "at least 0, or -1"), (TURNS, 7, "--reasoning-parser"), (HARMONY, 7, "not supported for reasoning")],
)
def test_a_budget_that_cannot_hold_is_refused(tmp_path: Path, template: str, budget: int, message: str) -> None:
    fake = FakeEngine(model(tmp_path, template, special=False))
    with serving(start=fake) as server:
        answer = server.post(CHAT, {"messages": MESSAGES, "thinking_token_budget": budget})
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == "thinking_token_budget"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_messages_reaches_the_template_under_either_name(hybrid: Path, name: str) -> None:
    earlier = {"role": "assistant", "content": "Rome.", name: "Because."}
    asked = Asked(hybrid, ["ok"], {"messages": [*MESSAGES, earlier, *MESSAGES]})
    assert "<assistant>Because.Rome." in asked.prompt
