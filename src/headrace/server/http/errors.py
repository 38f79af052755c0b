"""Errors as a client sees them: a status, and OpenAI's object that says what, why and which parameter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.engine.answer_stream import FailedRequestError
from headrace.errors import ConfigError, EngineDeadError, HeadraceError, RequestError

MAX_MESSAGE = 1000  # characters


class ApiError(HeadraceError):
    """What one request is answered with. Its message goes to the client as it is."""

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


class ClientGoneError(HeadraceError):
    """Nobody is there to be answered."""


def error_object(error: ApiError) -> dict[str, object]:
    """In which a value of the request may be repeated, but not all of it."""
    message = error.message if len(error.message) <= MAX_MESSAGE else f"{error.message[:MAX_MESSAGE]}…"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(error_object(error))


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def from_headrace(error: HeadraceError) -> ApiError:
    """The refusals of the layers below, as a client should see them."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(str(error), error.param, error.code)
        case ConfigError():
            return bad_request(str(error))
        case FailedRequestError():
            return ApiError(500, str(error), type="server_error", code="engine_error")
        case EngineDeadError():
            return ApiError(
                503,
                "the engine has stopped; try again later",
                type="server_error",
                code="engine_dead",
                headers={"Retry-After": "1"},
            )
    if (overload := _overload(error)) is not None:
        return overload
    return internal_error()


def internal_error() -> ApiError:
    """Nothing of what went wrong inside is told to strangers; the log has it."""
    return ApiError(500, "an error inside the server; its log says more", type="server_error", code="internal_error")


def _overload(error: HeadraceError) -> ApiError | None:
    """`Overloaded` of the admission, by what it carries: this module is below it."""
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        return None
    return ApiError(
        int(getattr(error, "status", 503)),
        str(error),
        type="overloaded_error",
        code=str(getattr(error, "reason", "overloaded")),
        headers={"Retry-After": str(retry_after_s)},
    )
