"""Prompts and conversations of requests as token ids. Long ones are tokenized beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.engine.prompts import Prompt, PromptReader, TokenizedPrompt
from headrace.server.http.errors import bad_request
from headrace.text import Tokenizer

T = TypeVar("T")

MAX_PROMPTS = 1024
INLINE_CHARACTERS = 512  # tokenized in about the time that it takes to hand them to a thread and back

# Arguments of other people's `apply_chat_template`; in a template they would be variables that nobody reads.
_RESERVED = frozenset(
    {
        *(
            "add_generation_prompt",
            "chat_template",
            "continue_final_message",
            "conversation",
            "documents",
            "max_length",
        ),
        *("messages", "padding", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)


async def beside(work: Callable[[], T], *, num_characters: int) -> T:
    """The work's result; on a thread if there is much of it, so that streams go on meanwhile."""
    return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


def as_prompts(given: str | list[Any] | None) -> list[Prompt]:
    """OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if given is None:
        raise bad_request("prompt is missing", "prompt", "missing_parameter")
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("prompt is an empty list", "prompt", "empty_prompt")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if len(given) > MAX_PROMPTS:
        raise bad_request(f"prompt has {len(given):,} prompts; at most {MAX_PROMPTS:,} are taken at once", "prompt")
    if kinds == {str}:
        return given
    for index, item in enumerate(given):
        if not isinstance(item, list) or set(map(type, item)) - {int}:
            raise bad_request(
                f"prompt[{index}]: prompt must be text, a list of texts, a list of token ids, or a list of such lists",
                "prompt",
                "invalid_type",
            )
    return given


async def tokenize(
    reader: PromptReader, prompts: Sequence[Prompt], *, add_special_tokens: bool
) -> list[TokenizedPrompt]:
    num_characters = sum(len(prompt) for prompt in prompts)
    return await beside(
        lambda: reader.read(prompts, add_special_tokens=add_special_tokens), num_characters=num_characters
    )


async def tokenize_chat(
    reader: PromptReader,
    messages: list[dict[str, Any]],
    *,
    num_characters: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> TokenizedPrompt:
    """`num_characters`: about how long it is; `variables`: of the template."""
    if continue_final_message and add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    begins_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    check_variables(reader, variables or {})

    def work() -> TokenizedPrompt:
        text = reader.render(
            with_objects(messages), add_generation_prompt=begins_answer, tools=tools or None, **(variables or {})
        )
        if continue_final_message:
            text = _up_to_final_message(text, messages)
        return reader.read([text], add_special_tokens=add_special_tokens)[0]

    return await beside(work, num_characters=num_characters)


def check_variables(reader: PromptReader, variables: Mapping[str, Any]) -> None:
    """What a template does not read would be ignored; what has a name of its own belongs there."""
    template = reader.tokenizer.chat_template
    for name in variables:
        if name in _RESERVED or name.startswith("return_"):
            raise bad_request(f"chat_template_kwargs cannot have {name!r}", f"chat_template_kwargs.{name}")
        if not name.isidentifier():
            raise bad_request("the names in chat_template_kwargs must be identifiers", "chat_template_kwargs")
        if template is None or name not in template.variables:
            raise bad_request(
                f"the model's chat template has no variable {name!r}; leave it out", f"chat_template_kwargs.{name}"
            )


def reads_variable(tokenizer: Tokenizer | None, name: str) -> bool:
    template = None if tokenizer is None else tokenizer.chat_template
    return template is not None and name in template.variables


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates read the arguments of earlier tool calls as objects; clients send them as text."""
    return [
        {**message, "tool_calls": _read_calls(message["tool_calls"])} if message.get("tool_calls") else message
        for message in messages
    ]


def _read_calls(calls: Any) -> Any:
    if not isinstance(calls, list):
        return calls
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return call  # what a model wrote wrong stays as it wrote it
    return {**call, "function": {**function, "arguments": arguments}}


def _up_to_final_message(text: str, messages: list[dict[str, Any]]) -> str:
    """The rendered conversation without what the template puts after the last message."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise bad_request("continue_final_message needs a last message with text", "messages")
    start = text.rfind(content.strip())
    if start < 0:
        raise bad_request(
            "continue_final_message: the chat template changes the last message, so it cannot be continued",
            "continue_final_message",
        )
    whole = content.lstrip()
    return text[:start] + (whole if text.startswith(whole, start) else content.strip())
