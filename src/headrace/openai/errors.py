"""OpenAI's error object, and the codes that several modules write. HTTP statuses are in `server/http/errors.py`."""

from __future__ import annotations

from headrace.errors import RequestError

MAX_MESSAGE = 1000  # characters; a message may repeat a value of the request, but not all of it

INVALID_REQUEST_ERROR = "invalid_request_error"  # types
SERVER_ERROR = "server_error"

INVALID_REQUEST = "invalid_request"  # codes
INVALID_TYPE = "invalid_type"
MISSING = "missing_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
MODEL_NOT_FOUND = "model_not_found"
ENGINE_ERROR = "engine_error"  # the engine gave the request up; not the request's fault


def error_object(
    message: str, *, type: str = INVALID_REQUEST_ERROR, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}…"
    return {"error": {"message": shown, "type": type, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str = INVALID_REQUEST) -> RequestError:
    return RequestError(message, param=param, code=code)


def not_supported(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code=UNSUPPORTED)
