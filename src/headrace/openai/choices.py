"""The objects `chat.completion` and `text_completion` as JSON.

They are formatted from byte templates, in less than half the time that encoding dictionaries takes: a job writes
millions of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

_FINISH_REASONS = {
    reason: encode(reason) for reason in ("stop", "length", "abort", "tool_calls", None)
}  # `abort` is vLLM's
_BODY = b'{"id":"%b","object":"%b","created":%d,"model":%b,"choices":[%b],"usage":%b,"system_fingerprint":null%b}'
_CHAT_CHOICE = (
    b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null%b},"logprobs":%b,'
    b'"finish_reason":%b,"stop_reason":%b%b}'
)
_TEXT_CHOICE = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}'

# vLLM's fields that a request can ask for. They are null if it does not: clients read them without a test.
_CHAT_NULLS = b',"prompt_logprobs":null,"prompt_token_ids":null'
_TEXT_CHOICE_NULLS = b',"prompt_logprobs":null,"prompt_token_ids":null,"token_ids":null'
_CHAT_CHOICE_NULLS = b',"token_ids":null'

CHAT_OBJECT = b"chat.completion"
TEXT_OBJECT = b"text_completion"
CHAT_ID_PREFIX = "chatcmpl-"
TEXT_ID_PREFIX = "cmpl-"


def completion_body(
    kind: bytes, id: bytes, created: int, model: bytes, choices: bytes, usage: bytes, more: bytes = b""
) -> bytes:
    """`id` without its quotes and `model` with them, as JSON; `choices` joined by commas; `more` from `members`, by
    default the null fields."""
    more = more or (_CHAT_NULLS if kind == CHAT_OBJECT else b"")
    return _BODY % (id, kind, created, model, choices, usage, more)


def chat_choice(
    index: int,
    content: str | None,
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    *,
    logprobs: bytes = b"null",
    message: bytes = b"",
    more: bytes = _CHAT_CHOICE_NULLS,
) -> bytes:
    """`message` and `more`: further members of the message and of the choice, from `members`; by default null
    fields."""
    stop = b"null" if stop_reason is None else encode(stop_reason)
    return _CHAT_CHOICE % (
        index,
        encode(content),
        message,
        logprobs,
        _FINISH_REASONS[finish_reason],
        stop,
        more,
    )


def text_choice(
    index: int,
    text: str,
    finish_reason: str | None,
    stop_reason: int | str | None = None,
    *,
    logprobs: bytes = b"null",
    more: bytes = _TEXT_CHOICE_NULLS,
) -> bytes:
    stop = b"null" if stop_reason is None else encode(stop_reason)
    return _TEXT_CHOICE % (index, encode(text), logprobs, _FINISH_REASONS[finish_reason], stop, more)


def members(fields: Mapping[str, Any]) -> bytes:
    """Members to append to an object: each with a comma before it; nothing for no fields."""
    return b"," + encode(fields)[1:-1] if fields else b""
