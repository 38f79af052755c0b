"""Replicas that do what a test says, over real sockets; a router in front of them; and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from headrace.server.http.lifecycle import BACKLOG, open_listener
from headrace.server.route.options import RouteOptions
from headrace.server.route.serve import RouteServer
from headrace.server.route.sources import Sources
from tests.server.live import until

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NEVER_S = 1e6  # between two scrapes


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes


Behaviour = Callable[["FakeReplica", Asked, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


def answer(status: int, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answers(status: int = 200, body: bytes = b'{"ok":true}', *headers: str) -> Behaviour:
    async def behave(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, body, *headers))

    return behave


def streams(*events: bytes) -> Behaviour:
    async def behave(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")

    return behave


def dies_after(*parts: bytes) -> Behaviour:
    """Write these parts of a stream, then close the connection."""

    async def behave(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunk, parts)))
        await writer.drain()
        writer.close()

    return behave


async def dies_without_answer(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def streams_until_closed(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """One event, and no end. `num_left` counts connections that were closed meanwhile."""
    writer.write(STREAM_HEAD + chunk(event("first")))
    await replica.wait_until_closed(writer)


async def never_answers(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    await replica.wait_until_closed(writer)


async def waits_to_be_released(replica: FakeReplica, asked: Asked, writer: asyncio.StreamWriter) -> None:
    await replica.release.wait()
    writer.write(answer(200, b'{"ok":true}'))


@dataclass
class FakeReplica:
    """GETs are answered from `pages`; POSTs by `behave`."""

    behave: Behaviour = field(default_factory=answers)
    pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    num_left: int = 0
    num_connections: int = 0

    async def __aenter__(self) -> FakeReplica:
        self.pages.setdefault("/ready", (200, b"{}"))
        self.pages.setdefault("/metrics", (200, b""))
        self.release = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release.set()
        self._server.close()

    def stop_listening(self) -> None:
        self._server.close()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"http://{self.name}"

    async def wait_until_closed(self, writer: asyncio.StreamWriter) -> None:
        reader: Any = writer.transport.get_protocol()._stream_reader  # type: ignore[attr-defined]
        try:
            await reader.read()
        except ConnectionError:
            pass
        self.num_left += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._serve_one(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in head[1:] if line}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            writer.write(answer(*self.pages.get(path, (404, b"{}"))))
            return headers.get("connection") != "close"
        asked = Asked(path, headers, body)
        self.asked.append(asked)
        await self.behave(self, asked, writer)
        return not writer.is_closing()


class Router:
    """A router in the test's event loop. Its clock stands still and it scrapes once at its start, unless the test says
    otherwise."""

    def __init__(self, replicas: Sequence[FakeReplica | str], **options: Any) -> None:
        addresses = [each if isinstance(each, str) else each.address for each in replicas]
        self.printed: list[str] = []
        self.options = RouteOptions(port=0, **options)
        self.now = 1_000.0  # the router's clock
        self.server = RouteServer(
            self.options,
            Sources(addresses),
            print_line=self.printed.append,
            scrape_interval_s=NEVER_S,
            clock=lambda: self.now,
        )
        self.fleet = self.server.fleet

    async def __aenter__(self) -> Router:
        listener = open_listener(self.options.server_options())
        listener.listen(BACKLOG)
        self.port = listener.getsockname()[1]
        self.exit = asyncio.create_task(self.server.run(listener))
        await until(lambda: self.server.lifecycle.is_started and len(self.fleet.replicas) > 0)
        await until(lambda: not self.fleet.is_scraping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.exit.done():
            self.server.lifecycle.stop()
            self.server.lifecycle.stop()
        await self.exit

    async def send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        return reader, writer

    async def ask(self, path: str, *headers: str, body: Any = None) -> Answer:
        """One request on a connection of its own."""
        reader, writer = await self.send(request_of(path, *headers, body=body))
        try:
            return Answer.parse(await reader.read())
        finally:
            writer.close()


def request_of(path: str, *headers: str, body: Any = None) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: router", "connection: close", *headers]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @classmethod
    def parse(cls, data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in lines[1:]}
        is_complete = True
        if headers.get("transfer-encoding") == "chunked":
            body, is_complete = dechunked(body)
        return cls(int(lines[0].split()[1]), headers, body, is_complete)


def dechunked(data: bytes) -> tuple[bytes, bool]:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            return b"".join(parts), True
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts), False
