"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from headrace.openai.schema.common import FormFields


class CompletionRequest(FormFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any] | None = None  # text, texts, token ids, or lists of token ids
    logprobs: int | None = None
    echo: bool | None = None
