"""Prompts and conversations of requests: OpenAI's forms of `prompt`, and messages rendered by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.engine.prompts import Messages, Prompt, PromptReader
from headrace.openai.errors import INVALID_TYPE, MISSING, bad_request
from headrace.openai.fields import note_ignored

MAX_PROMPTS = 1024
REASONING_EFFORT = "reasoning_effort"
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables that turn reasoning on and off
TEMPLATE_HINTS = (REASONING_EFFORT, "enable_thinking")  # ignored where the template does not read them

# Arguments of transformers' `apply_chat_template`. A template would read them as variables.
_RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)


def as_prompts(given: str | list[Any] | None, param: str = "prompt", *, max_prompts: int = MAX_PROMPTS) -> list[Prompt]:
    """OpenAI's four forms: text, texts, token ids, lists of token ids. `param`: the field's name."""
    if given is None:
        raise bad_request(f"{param} is missing", param, MISSING)
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request(f"{param} is an empty list", param, "empty_prompt")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if len(given) > max_prompts:
        raise bad_request(f"{param} has {len(given):,} prompts; at most {max_prompts:,} are taken at once", param)
    if kinds == {str}:
        return given
    forms = "text, a list of texts, a list of token ids, or a list of such lists"
    for index, item in enumerate(given):
        if not isinstance(item, list) or set(map(type, item)) - {int}:
            raise bad_request(f"{param}[{index}]: {param} must be {forms}", param, INVALID_TYPE)
    return given


def template_variables(kwargs: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    """The variables of the chat template that a request sets; `render_chat` checks them."""
    variables = dict(kwargs or {})
    if reasoning_effort is not None:
        variables[REASONING_EFFORT] = reasoning_effort
    return variables


def render_chat(
    reader: PromptReader,
    messages: Messages,
    variables: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as the model's chat template writes it. Special tokens are in the text."""
    for message in messages:
        if len(message) > 2:  # more than role and content
            messages = [_with_reasoning(message) for message in _with_objects(messages)]
            break
    if not variables and not tools and add_generation_prompt:  # the common case of a job's lines
        return reader.render(messages)
    checked = check_variables(reader, variables) if variables else {}
    return reader.render(messages, add_generation_prompt=add_generation_prompt, tools=tools or None, **checked)


def check_variables(reader: PromptReader, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that the template reads. Others are refused, except hints about reasoning."""
    template = reader.tokenizer.chat_template
    read = frozenset() if template is None else template.variables
    checked = _switches(variables, read)
    for name, value in variables.items():
        if name in _RESERVED or name.startswith("return_"):
            raise bad_request(f"chat_template_kwargs cannot have {name!r}", f"chat_template_kwargs.{name}")
        if not name.isidentifier():
            raise bad_request("the names in chat_template_kwargs must be identifiers", "chat_template_kwargs")
        if name in read:
            checked[name] = value
        elif name in TEMPLATE_HINTS:
            if not checked:
                note_ignored(name)
        else:
            raise bad_request(
                f"the model's chat template has no variable {name!r}; leave it out", f"chat_template_kwargs.{name}"
            )
    return checked


def _switches(variables: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """The variables that turn reasoning on or off, where only `reasoning_effort` says so: none is off, as in vLLM."""
    effort = variables.get(REASONING_EFFORT)
    if effort is None:
        return {}
    return {name: effort != "none" for name in THINKING_SWITCHES if name in read and name not in variables}


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under every name that templates read. Clients send one of the first two."""
    given = message.get("reasoning_content")
    reasoning = message.get("reasoning") if given is None else given
    if reasoning is None:
        return message
    return {**message, "reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}


def _with_objects(messages: Messages) -> Messages:
    """The messages with the arguments of tool calls as objects, which templates read; clients send them as text."""
    return [
        {**message, "tool_calls": _read_calls(message["tool_calls"])} if message.get("tool_calls") else message
        for message in messages
    ]


def _read_calls(calls: Any) -> Any:
    return [_read_call(call) for call in calls] if isinstance(calls, list) else calls


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return call  # invalid JSON that a model wrote is passed on as text
    return {**call, "function": {**function, "arguments": arguments}}
