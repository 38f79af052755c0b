"""POST /v1/responses."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.openai.schema.common import StreamOptions


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: bool | None = None


# Refused unless the value is null or one of these: they need conversations or prompts that are stored apart, or tools
# that the server would have to run.
UNSUPPORTED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
}
