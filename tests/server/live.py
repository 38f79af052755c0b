"""A server on a free port, in the test's event loop, with an application that needs no engine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import uvloop

from headrace.server.http.gate import Application, Gate, Receive, Scope, Send
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import Lifecycle, open_listener
from headrace.server.options import ServerOptions
from headrace.server.state import ServerState
from tests.server.asgi import PUBLIC_PATHS, Answer

TEST_TIMEOUT_S = 60.0  # ends a test that hangs; no result depends on it


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), TEST_TIMEOUT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


class TinyApp:
    """/echo responds with the body's length; /flood writes forever; /stream writes until `end` or an abort;
    /ignores-disconnect does not watch for a disconnect."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_left = 0  # disconnected clients
        self.num_cancelled = 0
        self.end = asyncio.Event()
        self.abort = asyncio.Event()

    async def abort_all(self) -> None:
        self.abort.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        try:
            handlers = {
                "/stream": self._stream,
                "/flood": self._flood,
                "/ignores-disconnect": self._ignore_disconnect,
            }
            await handlers.get(scope["path"], self._echo)(receive, send)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def _echo(self, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"%2d" % len(body)})

    async def _stream(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        waits = [asyncio.ensure_future(wait) for wait in (self.end.wait(), self.abort.wait(), receive())]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.num_left += waits[2] in done
        await send({"type": "http.response.body", "body": b"last" if waits[0] in done else b"aborted"})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left = asyncio.ensure_future(self._wait_for_disconnect(receive))
        while not left.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.num_left += 1

    async def _ignore_disconnect(self, receive: Receive, send: Send) -> None:
        """Do not watch for a disconnect."""
        await self.end.wait()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Live:
    """A server with its gate and lifecycle. `printed` holds its lines, `refused` the reasons of refusals."""

    def __init__(
        self,
        app: Application | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        has_given_up: Callable[[], bool] = lambda: False,
        on_lag: Callable[[float], None] = lambda seconds: None,
        **options: Any,
    ) -> None:
        self.tiny = TinyApp()
        self.printed: list[str] = []
        self.refused: list[str] = []
        self.options = ServerOptions(port=0, **options)
        self.state = ServerState()
        self.keys = Keys(self.options, environ={}, print_line=self.printed.append)
        gate = Gate(
            app or self.tiny, self.options, self.keys, public_paths=PUBLIC_PATHS, on_refused=self.refused.append
        )
        self.lifecycle = Lifecycle(
            gate,
            self.options,
            self.state,
            abort_all=self.tiny.abort_all,
            reload_keys=self.keys.reload,
            has_given_up=has_given_up,
            on_refused=self.refused.append,
            on_lag=on_lag,
            print_line=self.printed.append,
        )
        self._tls = tls

    async def __aenter__(self) -> Live:
        listener = open_listener(self.options)
        self.port = 0 if self.options.uds else listener.getsockname()[1]
        self.exit = asyncio.create_task(self.lifecycle.run(listener))
        await until(lambda: self.lifecycle.is_started or self.exit.done())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tiny.end.set()
        if not self.exit.done():
            self.lifecycle.stop()
        await self.exit

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.options.uds is not None:
            return await asyncio.open_unix_connection(self.options.uds)
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)

    async def ask(self, *parts: bytes) -> Answer:
        """Send the parts over a new connection and read one response."""
        reader, writer = await self.connect()
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await read_answer(reader)
        finally:
            writer.close()

    async def get(self, path: str = "/echo", **headers: str) -> Answer:
        lines = [
            f"GET {path} HTTP/1.1",
            "Host: x",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        return await self.ask("\r\n".join(lines).encode() + b"\r\n\r\n")


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    return Answer(int(status.split()[1]), headers, body)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server closes the connection, ignoring what it sends before."""
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    return True
