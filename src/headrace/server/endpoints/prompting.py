"""Tokenizes prompts and conversations: long ones on a thread, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.engine.prompts import LONG_TEXT, Prompt, PromptReader, TokenizedPrompt
from headrace.openai.errors import bad_request
from headrace.openai.prompts import render_chat

T = TypeVar("T")

INLINE_CHARACTERS = 512  # tokenized in about the time that it takes to hand them to a thread and back
CHARACTERS_PER_TOKEN = 4  # a rough mean, for the estimate


def estimated_tokens(prompts: Iterable[Prompt | Sequence[Any]], max_model_len: int) -> int:
    """About how many tokens wait in the queue until they are counted: texts, token ids or conversations.

    A prompt counts as no more than the context. A longer one is refused once it is tokenized, and must not keep others
    out until then. A text that is much longer counts as nothing: it is refused by its start, or truncated and counted.
    """
    return sum(min(_estimate(prompt, max_model_len), max_model_len) for prompt in prompts)


def _estimate(prompt: Any, max_model_len: int) -> int:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    num_characters, todo, max_characters = 0, [prompt], LONG_TEXT * max_model_len
    while todo and num_characters <= max_characters:
        value = todo.pop()
        if isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, dict):
            todo += [*value, *value.values()]
        elif isinstance(value, list):
            todo += value
    return 0 if num_characters > max_characters else num_characters // CHARACTERS_PER_TOKEN


async def off_loop(work: Callable[[], T], *, num_characters: int) -> T:
    """The result of `work`, which runs on a thread if it has many characters to process."""
    return work() if num_characters <= INLINE_CHARACTERS else await asyncio.to_thread(work)


async def tokenize(
    reader: PromptReader, prompts: Sequence[Prompt], *, add_special_tokens: bool, limited_param: str | None
) -> list[TokenizedPrompt]:
    """`limited_param`: the field that is named when a prompt is much too long for the context; None: no limit."""
    num_characters = sum(len(prompt) for prompt in prompts)
    return await off_loop(
        lambda: _read(reader, prompts, add_special_tokens=add_special_tokens, limited_param=limited_param),
        num_characters=num_characters,
    )


def _read(
    reader: PromptReader, prompts: Sequence[Prompt], *, add_special_tokens: bool, limited_param: str | None
) -> list[TokenizedPrompt]:
    if limited_param is None:
        return reader.read(prompts, add_special_tokens=add_special_tokens)
    return reader.read_within_context(prompts, add_special_tokens=add_special_tokens, param=limited_param)


async def tokenize_chat(
    reader: PromptReader,
    messages: list[dict[str, Any]],
    *,
    num_characters: int,
    limited_param: str | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> TokenizedPrompt:
    """`num_characters`: about how long the conversation is; `limited_param`: see `tokenize`; `variables`: of the
    template.
    """
    if continue_final_message and add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    starts_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def work() -> TokenizedPrompt:
        text = render_chat(reader, messages, variables, tools=tools, add_generation_prompt=starts_answer)
        if continue_final_message:
            text = _up_to_final_message(text, messages)
        return _read(reader, [text], add_special_tokens=add_special_tokens, limited_param=limited_param)[0]

    return await off_loop(work, num_characters=num_characters)


def _up_to_final_message(text: str, messages: list[dict[str, Any]]) -> str:
    """The rendered conversation without what the template writes after the last message."""
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
