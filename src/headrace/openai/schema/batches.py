"""The body for POST /v1/batches."""

from __future__ import annotations

from msgspec import Struct


class OutputExpiry(Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class BatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None
    priority: int = 0  # Headrace's own: lower numbers run first
