"""Errors as a client sees them: a status and OpenAI's JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.errors import HeadraceError


class ApiError(HeadraceError):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )
