"""HTTP/1.1 to one replica: connections that are used again, and answers that are read at the pace of the client.

    ask(request) ─▶ Head         read() ─▶ the bytes at hand ─▶ ... ─▶ b"" at the end

A connection pauses its socket while more than MAX_BUFFERED bytes wait to be read: a slow client slows its replica down
and costs the router no memory.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.errors import HeadraceError

CONNECT_TIMEOUT_S = 3.0
MAX_BUFFERED = 256 * 1024  # bytes of an answer
MAX_IDLE = 64  # connections that are kept for later, per replica
MAX_IDLE_S = 4.0  # servers close idle connections, many after five seconds
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that is gone is found in 30 s


class NoConnectionError(HeadraceError):
    """Nothing was sent: the replica does not accept connections."""


class LostError(HeadraceError):
    """The connection was lost before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: list[tuple[bytes, bytes]]  # names in lower case

    def get(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    @property
    def is_stream(self) -> bool:
        return self.get(b"content-type").lower().startswith(b"text/event-stream")


class Connection(asyncio.Protocol):
    """One connection, one request at a time. `is_reusable` after an answer says whether it may send another."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_reusable = False
        self.was_failed = False  # by `fail`, not by the replica
        self._begin()

    def _begin(self) -> None:
        self._head: Head | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: deque[bytes] = deque()
        self._num_buffered = 0
        self._was_read = False  # a byte of the body
        self._is_paused = False
        self._is_complete = False
        self._error: HeadraceError | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a byte of the answer's body has come."""
        return self._is_complete or self._num_buffered > 0 or self._was_read

    async def ask(self, request: bytes) -> Head:
        """Send a request and wait for the head of its answer."""
        self._begin()
        if self._transport is None or self._transport.is_closing():
            raise LostError("the connection was closed")
        self._transport.write(request)
        while self._head is None:
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """The next bytes of the body; empty at its end."""
        while not self._parts and not self._is_complete:
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_buffered = 0
        self._was_read = self._was_read or bool(data)
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def fail(self, error: HeadraceError) -> None:
        """End the request in flight with this error, and the connection."""
        self._error = self._error or error
        self.was_failed = True
        self._wake()
        self.close()

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._parts:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._is_complete:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(LostError(f"the answer is not HTTP/1.1: {error}"))
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._head is not None and not self._is_complete and self._ends_with_close:
            self._is_complete = True
        elif not self._is_complete:
            self._error = self._error or LostError("the replica closed the connection")
        self._wake()

    # the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._head = Head(status, self._headers)
        self._headers = []

    @property
    def _ends_with_close(self) -> bool:
        """Whether the body has no length, so that closing the connection ends it."""
        return self._head is not None and not (
            self._head.get(b"content-length") or self._head.get(b"transfer-encoding")
        )

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_buffered += len(data)
        if self._num_buffered > MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head is None:  # 1xx: the answer is still to come
            return
        self._is_complete = True
        self.is_reusable = bool(self._parser.should_keep_alive()) and not self._ends_with_close
        if not self.is_reusable:
            self.close()


class Pool:
    """Connections to one replica."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._host, self._tls = parts.hostname or "", _tls(parts.scheme)
        self._port = parts.port or (443 if self._tls else 80)
        self.host_header = parts.netloc.encode()
        self.path = parts.path.rstrip("/").encode()  # before the path of each request
        self._idle: list[tuple[float, Connection]] = []

    def take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_reusable and now - since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise NoConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise NoConnectionError(f"no connection: {error.strerror or error}") from None
        return connection

    def put_back(self, connection: Connection) -> None:
        """Keep a connection for later if its answer is complete, else close it."""
        if connection.is_reusable and len(self._idle) < MAX_IDLE:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            connection.close()

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()


def _tls(scheme: str) -> ssl.SSLContext | None:
    return ssl.create_default_context() if scheme == "https" else None


def _keep_alive(sock: Any) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
