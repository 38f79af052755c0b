"""One HTTP request and its response over ASGI: the body in, a whole response or a stream of events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from headrace.engine.event_queue import EventQueue
from headrace.server.http.errors import ApiError, ClientGoneError, error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
PART = "headrace.part"  # the key of a `BodyPart` in a request's scope


class BodyPart(Protocol):
    """Writes a chunk of a started response to its connection at once: `send` without its coroutine."""

    @property
    def can_be_written(self) -> bool:
        """Whether the client reads fast enough; if not, use `send`, which waits."""
        ...

    def write(self, data: bytes) -> None: ...


class Deadline(NamedTuple):
    """When a request is given up."""

    limit_s: float  # from its arrival
    left_s: float


class Exchange:
    """Owned by the task that handles the request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.send = send
        self.status: int | None = None  # set once the status line has been sent
        self.fail_stream: Callable[[ApiError], Awaitable[None]] | None = None  # set once a stream has started
        self.load_report: Callable[[], Mapping[str, str]] = dict  # further headers of a successful answer
        self._receive = receive
        self._returned: bytes | None = None  # see `return_body`

    def return_body(self, body: bytes) -> None:
        """Let the next `read_body` return the body again, for a handler that was chosen by it."""
        self._returned = body

    def detached(self) -> Exchange:
        """The same request without its client: it never disconnects, and what is sent is dropped."""

        async def receive() -> Message:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Message) -> None:
            pass

        return Exchange(self.scope, receive, send)

    @property
    def has_begun(self) -> bool:
        return self.status is not None

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def part(self) -> BodyPart | None:
        """Direct access to the connection, where the server provides it."""
        part: BodyPart | None = self.scope.get(PART)
        return part

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def read_body(self, limit: int) -> bytes:
        self._check_is_json()
        if self._returned is not None:
            body, self._returned = self._returned, None
            return body
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client disconnected before its request was complete")
            part = message.get("body", b"")
            length += len(part)
            if length > limit:
                raise ApiError(413, f"the body is longer than {limit:,} bytes", code="body_too_long")
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def body_parts(self, *, limit: int, timeout_s: float) -> AsyncIterator[bytes]:
        """The body as it arrives, for routes that stream it. `timeout_s` is the maximum wait for the next part."""
        length = 0
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(
                    408, f"no data came for {timeout_s:g} seconds", type="timeout_error", code="read_timeout"
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError("the client disconnected before its request was complete")
            part = message.get("body", b"")
            length += len(part)
            if length > limit:
                raise ApiError(413, f"the body is longer than {limit:,} bytes", code="body_too_long")
            if part:
                yield part
            if not message.get("more_body", False):
                return

    def _check_is_json(self) -> None:
        given = (self.header(b"content-type") or b"").split(b";")[0].strip().lower()
        if given != JSON.encode():
            raise ApiError(415, f"the body must be JSON, with Content-Type: {JSON}", code="unsupported_media_type")

    async def reply(
        self, status: int, body: bytes, *, content_type: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        fields = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        more = {**(headers or {}), **(self.load_report() if status < 300 else {})}
        fields += [(name.lower().encode(), value.encode()) for name, value in more.items()]
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": fields})
        await self.send({"type": "http.response.body", "body": body})

    async def fail(self, error: ApiError) -> None:
        """Report an error: as a response, or as an event if a stream has started."""
        if not self.has_begun:
            request_id = self.scope.get("headrace", {}).get("request_id")
            body = error_body(error, path=self.path, request_id=request_id)
            await self.reply(error.status, body, headers=error.headers)
        elif self.fail_stream is not None:
            await self.fail_stream(error)

    @contextmanager
    def watched_by(self, event_queue: EventQueue, *, deadline: Deadline | None = None) -> Iterator[None]:
        """Let a disconnect and the deadline end the event queue while inside."""
        loop = asyncio.get_running_loop()
        watching = loop.create_task(self._watch(event_queue))
        timer = None
        if deadline is not None:
            timer = loop.call_later(deadline.left_s, event_queue.end, too_late(deadline))
        try:
            yield
        finally:
            watching.cancel()
            if timer is not None:
                timer.cancel()

    async def _watch(self, event_queue: EventQueue) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        event_queue.end(ClientGoneError("the client has disconnected"))


def too_late(deadline: Deadline) -> ApiError:
    return ApiError(
        504,
        f"the request was given up after its {deadline.limit_s:g} seconds; allow it more time, or ask for less",
        type="timeout_error",
        code="request_timeout",
    )
