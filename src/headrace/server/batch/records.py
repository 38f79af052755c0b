"""What is stored of files and batches, and the states of a batch.

validating ─┬─▶ in_progress ─┬─▶ finalizing ─▶ completed
            │                ├─▶ expired
            └─▶ failed ◀─────┘
validating, in_progress ─▶ cancelling ─▶ cancelled
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Purpose = Literal["batch", "batch_output"]

UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
FINISHED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
STATUSES = (*UNFINISHED, *FINISHED)
NEXT: dict[Status, tuple[Status, ...]] = {
    "validating": ("failed", "in_progress", "cancelling"),
    "in_progress": ("failed", "finalizing", "expired", "cancelling"),
    "finalizing": ("failed", "completed"),
    "cancelling": ("cancelled",),
}
WINDOW = "24h"
PRIORITIES = (-1000, 1000)  # the most and the least urgent that a client may ask for
FILE_ID = "file-"
BATCH_ID = "batch_"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str  # a hash of the key; empty on a server without keys
    num_bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose

    def as_object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class LineError(msgspec.Struct, frozen=True):
    """One entry of `errors.data`."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchUsage(msgspec.Struct, frozen=True):
    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0

    def as_object(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_input,
            "input_tokens_details": {"cached_tokens": self.num_cached},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_input + self.num_output,
        }


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    status: Status = "validating"
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    times: dict[str, int] = {}  # of the other states, by their names
    model: str | None = None
    adapters: dict[
        str, str
    ] = {}  # that its lines name: the directories from which they were loaded when it was validated
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    priority: int = 0  # lower numbers run first
    errors: list[LineError] = []
    counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    output_file_id: str | None = None
    error_file_id: str | None = None

    def moved(self, status: Status, *, at: int, **changes: Any) -> Batch:
        """The batch in another state, which must be one that may follow."""
        assert status in NEXT.get(self.status, ()), f"{self.status} cannot become {status}"
        return msgspec.structs.replace(self, status=status, times={**self.times, status: at}, **changes)

    def as_object(self, *, counts: Counts | None = None) -> dict[str, Any]:
        """OpenAI's batch object. `counts` are those of the job that runs now."""
        errors = None
        if self.errors:
            errors = {"object": "list", "data": [msgspec.to_builtins(error) for error in self.errors]}
        times = {f"{name}_at": self.times.get(name) for name in (*NEXT, *FINISHED) if name != "validating"}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": msgspec.to_builtins(counts or self.counts),
            "usage": self.usage.as_object(),
            "metadata": self.metadata,
            "priority": self.priority,  # Headrace's own
        }


def new_id(prefix: str) -> str:
    """An id that nobody can guess: 192 random bits."""
    return prefix + secrets.token_hex(24)
