"""POST /invocations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class InvocationRequest(Struct, kw_only=True):
    """The body of a chat, a completion or an embedding; this is only what tells them apart."""

    messages: list[Any] | None = None
    prompt: str | list[Any] | None = None
    input: str | list[Any] | None = None
