"""POST /invocations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class InvocationRequest(Struct, kw_only=True):
    """The body of a chat, a completion, an embedding or a score; this is only what tells them apart."""

    messages: list[Any] | None = None
    prompt: str | list[Any] | None = None
    input: str | list[Any] | None = None
    query: str | None = None
    text_1: str | list[Any] | None = None
    requestType: str | None = None  # of a session: NEW_SESSION or CLOSE
