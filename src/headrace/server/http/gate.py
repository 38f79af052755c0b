"""ASGI middleware in front of the application: authentication, CORS, and limits on body size and read time.

Denies by default: every path but the public ones needs a key once there are keys. It decides by `scope["path"]`, the
string the application routes by; the Host header and the URL are not used.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from uuid import uuid4

from headrace.anthropic.errors import PATH_PREFIX
from headrace.server.http.errors import ApiError, error_body
from headrace.server.http.keys import Key, Keys
from headrace.server.http.origins import is_own_page
from headrace.server.http.routes import ADMIN_PREFIX
from headrace.server.options import ServerOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_PRESENTED_KEYS = 4
MAX_HELD_BODIES = 64  # limit on all bodies held at once, in multiples of max_body_bytes
DROP_BODY_S = 5.0  # for the rest of a body that was refused
PREFLIGHT_SECONDS = b"600"
TOKEN_COUNTS = ("num_prompt_tokens", "num_output_tokens")  # of a request, once an endpoint knows them

_REASONS = {
    401: "auth",
    403: "auth",
    404: "not_found",
    408: "timeout",
    413: "body_too_long",
    503: "bodies",
}  # names in metrics
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger("headrace.access")


class Gate:
    """Wraps an ASGI application. What it finds out about a request is in `scope["headrace"]`: `request_id`,
    `arrived_at`, `key_name`, `cache_salt`, `owner` and `is_admin` of the key; and of the server `needs_key` and
    `has_admin`. Endpoints add the `TOKEN_COUNTS`."""

    def __init__(
        self,
        app: Application,
        options: ServerOptions,
        keys: Keys,
        *,
        public_paths: frozenset[str],
        control_paths: frozenset[str] = frozenset(),
        control_prefixes: tuple[str, ...] = (),
        streamed_paths: frozenset[str] = frozenset(),
        on_refused: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._options = options
        self._keys = keys
        self._public_paths = public_paths
        self._control_paths = control_paths
        self._control_prefixes = control_prefixes
        self._streamed_paths = streamed_paths
        self._origins = options.origins
        self._on_refused = on_refused
        self._clock = clock
        self._num_held_bytes = 0  # of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are switched off"
        facts = {
            "request_id": _request_id(scope),
            "arrived_at": self._clock(),
            "needs_key": self._keys.are_required,
            "has_admin": self._keys.has_admin,
        }
        answer = _Answer(send, self._headers_of_every_answer(scope, facts["request_id"]))
        scope = {**scope, "path": self._path(scope), "root_path": self._options.root_path, "headrace": facts}
        try:
            await self._handle(scope, receive, answer)
        except ApiError as error:
            self._on_refused(_REASONS.get(error.status, "validation"))
            await _refuse(error, scope, receive, answer, self._options)
        finally:
            if self._options.enable_log_requests:
                self._log(scope, answer)

    async def _handle(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        origin = _header(scope, b"origin")
        if origin is not None:
            self._check_origin(origin, scope)
            if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None:
                await self._answer_preflight(scope, answer)
                return
        scope["headrace"] |= self._identify(scope)
        _check_encoding(scope)
        if not _has_body(scope) or scope["path"] in self._streamed_paths:
            await self._app(scope, receive, answer.send)
            return
        parts: list[bytes] = []
        try:
            if await self._read_body(scope, receive, parts):  # else the client disconnected
                answer.is_body_read = True
                await self._app(scope, _once(b"".join(parts), receive), answer.send)
        finally:
            self._num_held_bytes -= sum(map(len, parts))

    def _path(self, scope: Scope) -> str:
        """Returns the path without `root_path`, the prefix that a proxy may have left on it."""
        path, prefix = str(scope["path"]), self._options.root_path
        if prefix and path.startswith(prefix + "/"):
            return path[len(prefix) :]
        return path

    # ---- authentication

    def _identify(self, scope: Scope) -> dict[str, Any]:
        path = scope["path"]
        if path in self._public_paths:
            return _facts_of(None)
        is_control = path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")
        is_listed = path in self._control_paths or path.startswith(self._control_prefixes)
        is_control = is_control or (is_listed and self._keys.has_admin)
        if is_control and not self._keys.has_admin:
            raise ApiError(404, "there is no such route", code="not_found")
        if not (is_control or self._keys.are_required):
            return _facts_of(None)
        key = self._presented_key(scope)
        if key is None:
            raise _unauthorized()
        if is_control and not key.is_admin:
            raise ApiError(403, "this route needs the admin key", type="permission_error", code="auth")
        return _facts_of(key)

    def _presented_key(self, scope: Scope) -> Key | None:
        found: Key | None = None
        for presented in _presented(scope)[:MAX_PRESENTED_KEYS]:
            found = self._keys.find(presented) or found
        return found

    # ---- CORS

    def _check_origin(self, origin: bytes, scope: Scope) -> None:
        """Refuse other origins on every request: browsers send a preflight only for some."""
        if "*" in self._origins or origin.decode("latin-1") in self._origins:
            return
        if is_own_page(origin, scope["headers"], are_keys_required=self._keys.are_required):
            return
        raise ApiError(
            403,
            "pages of this origin may not use the server; --allowed-origins lists those that may",
            type="permission_error",
            code="origin",
        )

    async def _answer_preflight(self, scope: Scope, answer: _Answer) -> None:
        asked = _header(scope, b"access-control-request-headers") or b"authorization, content-type, x-api-key"
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked if _is_plain(asked) else b""),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
            (b"content-length", b"0"),
        ]
        await answer.send({"type": "http.response.start", "status": 204, "headers": headers})
        await answer.send({"type": "http.response.body"})

    def _headers_of_every_answer(self, scope: Scope, request_id: Any) -> list[Header]:
        headers: list[Header] = []
        if self._options.enable_request_id_headers:
            headers.append((b"x-request-id", str(request_id).encode()))
            if scope["path"].startswith(PATH_PREFIX):  # the name that Anthropic's clients read
                headers.append((b"request-id", str(request_id).encode()))
        origin = _header(scope, b"origin")
        if origin is not None and self._origins:
            if "*" in self._origins:
                headers.append((b"access-control-allow-origin", b"*"))
            elif origin.decode("latin-1") in self._origins:
                headers.append((b"access-control-allow-origin", origin))
            headers += [(b"vary", b"origin"), (b"access-control-expose-headers", b"x-request-id, retry-after")]
        return headers

    # ---- request bodies

    async def _read_body(self, scope: Scope, receive: Receive, parts: list[bytes]) -> bool:
        """Read the body into `parts`. Returns False if the client disconnected."""
        limit, seconds = self._options.max_body_bytes, self._options.read_timeout_s
        if _content_length(scope) > limit:
            raise _too_long(limit)
        num_bytes = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    self._num_held_bytes += len(parts[-1])
                    if num_bytes > limit:
                        raise _too_long(limit)
                    if self._num_held_bytes > MAX_HELD_BODIES * limit:
                        raise _too_much()
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {seconds:g} seconds", type="timeout_error", code="read_timeout"
            ) from None

    def _log(self, scope: Scope, answer: _Answer) -> None:
        facts = scope["headrace"]
        fields = {
            "method": scope["method"],
            "path": _printable(scope["path"]),
            "status": answer.status,
            "key": facts.get("key_name"),
            "request_id": facts["request_id"],
            "seconds": round(self._clock() - facts["arrived_at"], 3),
        }
        tokens = {name: facts[name] for name in TOKEN_COUNTS if name in facts}
        log.info("%s %s %s key=%s id=%s %.3fs", *fields.values(), extra={**fields, **tokens})


class _Answer:
    """Wraps `send`: adds the common headers and records the status."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send = send
        self._headers = headers
        self.status: int | None = None
        self.is_body_read = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message. Not a coroutine of its own, as it runs for every token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        return self._send(message)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, answer: _Answer, options: ServerOptions) -> None:
    """Send the error and close. The rest of the body is read before closing, within limits, so that the client sees
    the response."""
    if answer.status is not None:  # the response has already started
        raise error
    body = error_body(error, path=scope["path"], request_id=scope["headrace"]["request_id"])
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    is_read = answer.is_body_read or not _has_body(scope)
    if not is_read:
        headers.append((b"connection", b"close"))
    await answer.send({"type": "http.response.start", "status": error.status, "headers": headers})
    await answer.send({"type": "http.response.body", "body": body, "more_body": not is_read})
    if not is_read:
        if error.status != 408 and _header(scope, b"expect") is None:
            await _drop_body(receive, options)
        await answer.send({"type": "http.response.body"})


async def _drop_body(receive: Receive, options: ServerOptions) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(min(DROP_BODY_S, options.read_timeout_s)):
            while num_bytes <= options.max_body_bytes:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        pass


def _once(body: bytes, receive: Receive) -> Receive:
    """Returns the body as one message, then what `receive` gives: the disconnect."""
    is_given = False

    async def receive_whole() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_whole


def _facts_of(key: Key | None) -> dict[str, Any]:
    if key is None:
        return {"key_name": None, "cache_salt": None, "owner": "", "is_admin": False}
    return {"key_name": key.name, "cache_salt": key.cache_salt, "owner": key.owner, "is_admin": key.is_admin}


def _presented(scope: Scope) -> list[bytes]:
    keys: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(token.strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _request_id(scope: Scope) -> str:
    """Returns the client's request id if it is short and plain, else a new one."""
    given = _header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return uuid4().hex


def _has_body(scope: Scope) -> bool:
    return _header(scope, b"transfer-encoding") is not None or _content_length(scope) > 0


def _check_encoding(scope: Scope) -> None:
    encoding = _header(scope, b"content-encoding") or b"identity"
    if _has_body(scope) and encoding.lower() != b"identity":
        shown = _printable(encoding[:20].decode("latin-1"))
        raise ApiError(
            415,
            f"the body has the Content-Encoding {shown}; send it uncompressed",
            code="unsupported_media_type",
            headers={"Accept-Encoding": "identity"},
        )


def _content_length(scope: Scope) -> int:
    value = _header(scope, b"content-length") or b"0"
    return int(value) if value.isdigit() else 0  # the parser has refused anything else


def _is_plain(value: bytes) -> bool:
    return len(value) <= 1024 and re.fullmatch(rb"[A-Za-z0-9 ,_-]*", value) is not None


def _printable(path: str) -> str:
    return path[:256].encode("unicode_escape").decode("ascii")


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _too_much() -> ApiError:
    return ApiError(
        503,
        "too many long bodies are being read; try again soon",
        type="overloaded_error",
        code="bodies",
        headers={"Retry-After": "1"},
    )


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit:,} bytes", code="body_too_long")
