"""Anthropic's error object."""

from __future__ import annotations

from headrace.openai.errors import MAX_MESSAGE

PATH_PREFIX = "/v1/messages"  # of the routes whose errors have this form

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_object(message: str, status: int, request_id: str | None = None) -> dict[str, object]:
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    return {"type": "error", "error": {"type": error_type(status), "message": shown}, "request_id": request_id}
