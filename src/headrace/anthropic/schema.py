"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class CountTokensRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the number of prompt tokens depends on."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


# Ignored, with a note in the log: an answer without them is a right one. The cache needs no marks, and the client's
# own context is not edited.
HINTS = frozenset(
    {"cache_control", "context_management", "diagnostics", "fallbacks", "user_profile_id", "workspace_id"}
)

# Refused unless the value is null or one of these.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
