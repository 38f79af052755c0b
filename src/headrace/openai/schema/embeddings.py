"""The body for /v1/embeddings."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]  # text, texts, token ids, or lists of token ids
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
