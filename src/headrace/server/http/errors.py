"""Errors as HTTP answers: a status and headers around the error object of OpenAI or, on its routes, Anthropic."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.anthropic import errors as anthropic
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    FailedRequestError,
    HeadraceError,
    ProfilerError,
    RequestError,
)
from headrace.openai.errors import ENGINE_ERROR, INVALID_REQUEST, INVALID_REQUEST_ERROR, SERVER_ERROR, error_object


class ApiError(HeadraceError):
    """The answer to one request. Its message goes to the client unchanged."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST_ERROR,
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
    """The client has disconnected."""


def error_body(error: ApiError, *, path: str = "", request_id: str | None = None) -> bytes:
    """In the form of the API that has this path."""
    if path.startswith(anthropic.PATH_PREFIX):
        return msgspec.json.encode(anthropic.error_object(error.message, error.status, request_id))
    return msgspec.json.encode(error_object(error.message, type=error.type, param=error.param, code=error.code))


def from_headrace(error: HeadraceError) -> ApiError:
    """The errors of the layers below, as a client sees them."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case ConfigError():
            return ApiError(400, str(error), code=INVALID_REQUEST)
        case ProfilerError(is_conflict=True):
            return ApiError(409, str(error), code="profiler_conflict")
        case ProfilerError():
            return ApiError(500, str(error), type=SERVER_ERROR, code="profiler_failed")
        case FailedRequestError():
            return ApiError(500, str(error), type=SERVER_ERROR, code=ENGINE_ERROR)
        case EngineDeadError(code="asleep"):
            return ApiError(503, str(error), type=SERVER_ERROR, code="asleep", headers={"Retry-After": "1"})
        case EngineDeadError():
            return ApiError(
                503,
                "the engine has stopped; try again later",
                type=SERVER_ERROR,
                code="engine_dead",
                headers={"Retry-After": "1"},
            )
    if (overload := _overload(error)) is not None:
        return overload
    return internal_error()


def internal_error() -> ApiError:
    """Says nothing about the cause, which only the log has."""
    return ApiError(500, "an error inside the server; its log says more", type=SERVER_ERROR, code="internal_error")


def without_message(error: BaseException) -> BaseException:
    """The same traceback under an error of the same name that says nothing, for the log: a message may hold what the
    client sent."""
    return Exception(type(error).__name__).with_traceback(error.__traceback__)


def _overload(error: HeadraceError) -> ApiError | None:
    """`Overloaded` of the request queue, recognized by its attributes: this module is below it."""
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
