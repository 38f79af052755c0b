"""POST /v1/chat/completions, and the same for several conversations."""

from __future__ import annotations

from typing import Any

from headrace.openai.schema.common import FormFields


class ChatFields(FormFields, kw_only=True, forbid_unknown_fields=True):
    """All fields but the conversation."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None


class ChatRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]


class ChatBatchRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[list[dict[str, Any]]]  # conversations
