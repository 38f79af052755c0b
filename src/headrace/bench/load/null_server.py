"""A server with OpenAI's streaming API that costs next to nothing: for tests, and to measure the client's own limits.

Each answer has a fixed pace: a time to the first token and a time between tokens. Faults can be injected: a slow
start-up phase, refusals, an error in the middle of an answer, the death of the whole process. Every token is one chunk
in one write; with no pace at all, an answer is written at once.

    python -m headrace.bench.load.null_server --itl-ms 10 --ttft-ms 50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from time import monotonic
from typing import Any

import httptools
import msgspec

READY = "null server on port "
DEFAULT_LEN = 16  # tokens of an answer that has no max_tokens
DEATH = 70  # exit status of an injected death


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How the null server answers. Times are in seconds."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    warm_up_s: float = 0.0  # for this long after the first request, tokens take `warm_up_factor` times as long
    warm_up_factor: float = 2.0
    refused_share: float = 0.0  # of requests, refused with 503; evenly spread
    dies_after: int | None = None  # requests; the process ends in the middle of the next answer
    tokens_per_chunk: int = 1
    max_len: int | None = None  # tokens of an answer, whatever the request asks for
    has_usage: bool = True

    def pace(self, seconds: float) -> tuple[float, float]:
        """Time to the first token and between tokens, this long after the first request."""
        factor = self.warm_up_factor if seconds < self.warm_up_s else 1.0
        return self.ttft_s * factor, self.itl_s * factor

    def is_refused(self, number: int) -> bool:
        """Whether request `number`, counted from 0, is refused."""
        return int((number + 1) * self.refused_share) > int(number * self.refused_share)


class NullServer:
    """State of all connections: how many requests there were, and when the first came."""

    def __init__(self, behaviour: Behaviour, clock: Callable[[], float] = monotonic) -> None:
        self.behaviour, self.clock = behaviour, clock
        self.num_requests = 0
        self._first_at: float | None = None

    def next_request(self) -> int:
        if self._first_at is None:
            self._first_at = self.clock()
        self.num_requests += 1
        return self.num_requests - 1

    def pace(self) -> tuple[float, float]:
        assert self._first_at is not None
        return self.behaviour.pace(self.clock() - self._first_at)

    def protocol(self) -> NullProtocol:
        return NullProtocol(self)


class NullProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: NullServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._body, self._url = [], b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":
            self._respond(200, {"object": "list", "data": [{"id": "null", "object": "model"}]})
            return
        server, number = self._server, self._server.next_request()
        if server.behaviour.is_refused(number):
            self._respond(503, {"error": {"message": "the queue is full", "code": 503}})
            return
        try:
            asked = msgspec.json.decode(b"".join(self._body))
        except msgspec.DecodeError as error:
            self._respond(400, {"error": {"message": f"not JSON: {error}", "code": 400}})
            return
        is_doomed = server.behaviour.dies_after is not None and number >= server.behaviour.dies_after
        Stream(self._transport, server, asked, is_chat=b"chat" in self._url, is_doomed=is_doomed).start()

    def _respond(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._transport.write(head.encode() + text)


class Stream:
    """One answer while it is sent."""

    __slots__ = ("_chunk", "_end", "_is_doomed", "_itl_s", "_next_at", "_num_left", "_server", "_transport", "_ttft_s")

    def __init__(
        self, transport: Any, server: NullServer, asked: dict[str, Any], *, is_chat: bool, is_doomed: bool
    ) -> None:
        self._transport, self._server, self._is_doomed = transport, server, is_doomed
        self._ttft_s, self._itl_s = server.pace()
        num_tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or DEFAULT_LEN
        num_tokens = min(num_tokens, server.behaviour.max_len or num_tokens)
        per_chunk = server.behaviour.tokens_per_chunk
        self._num_left = -(-num_tokens // per_chunk)
        self._chunk = chunk_of(is_chat, " word" * per_chunk)
        self._end = end_of(is_chat, num_prompt_tokens(asked), num_tokens, server.behaviour.has_usage)
        self._next_at = 0.0

    def start(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if not self._ttft_s and not self._itl_s and not self._is_doomed:
            self._transport.write(head + self._chunk * self._num_left + self._end)
            return
        self._transport.write(head)
        loop = asyncio.get_running_loop()
        # Times are multiples of the timer's resolution from now on: they do not drift with the time of a write.
        self._next_at = loop.time() + self._ttft_s
        loop.call_at(self._next_at, self._send)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._is_doomed and self._num_left == 1:
            os._exit(DEATH)
        self._num_left -= 1
        if self._num_left <= 0:
            self._transport.write(self._chunk + self._end)
            return
        self._transport.write(self._chunk)
        if self._server.behaviour.warm_up_s:  # it may end in the middle of an answer
            self._itl_s = self._server.pace()[1]
        self._next_at += self._itl_s
        asyncio.get_running_loop().call_at(self._next_at, self._send)


def chunk_of(is_chat: bool, text: str) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
    return _framed(_event(is_chat, [choice | {"finish_reason": None}]))


def end_of(is_chat: bool, num_prompt: int, num_output: int, has_usage: bool) -> bytes:
    """The finish reason, usage, [DONE], and the end of the body."""
    choice: dict[str, Any] = {"index": 0, "delta": {}} if is_chat else {"index": 0, "text": ""}
    events = _event(is_chat, [choice | {"finish_reason": "length"}])
    if has_usage:
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        events += _event(is_chat, [], usage=counts | {"total_tokens": num_prompt + num_output})
    return _framed(events + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def num_prompt_tokens(asked: dict[str, Any]) -> int:
    """Token ids as they are; text by its words."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt] if prompt else [str(message.get("content")) for message in asked.get("messages") or []]
    return sum(len(str(text).split()) for text in texts)


def _event(is_chat: bool, choices: list[Any], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    body = {"id": "cmpl-0", "object": kind, "created": 0, "model": "null", "choices": choices, **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def null_server(behaviour: Behaviour | None = None) -> Iterator[NullServerProcess]:
    """A null server in a process of its own."""
    process = NullServerProcess(behaviour or Behaviour())
    try:
        yield process
    finally:
        process.stop()


class NullServerProcess:
    def __init__(self, behaviour: Behaviour) -> None:
        flags = [part for name, value in _flags(behaviour).items() for part in (name, value)]
        command = [sys.executable, "-m", "headrace.bench.load.null_server", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"the null server did not start: {line!r}")
        self.port = int(line.removeprefix(READY))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        """End it; returns its exit status."""
        self._process.terminate()
        status = self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


def _flags(behaviour: Behaviour) -> dict[str, str]:
    return {
        f"--{name.replace('_', '-')}": json.dumps(value)
        for name, value in asdict(behaviour).items()
        if value is not None
    }


async def listen(behaviour: Behaviour, host: str, port: int) -> asyncio.Server:
    """Serve in the running event loop."""
    server = NullServer(behaviour)
    return await asyncio.get_running_loop().create_server(server.protocol, host, port, backlog=4096)


async def _serve(behaviour: Behaviour, host: str, port: int) -> None:
    server = await listen(behaviour, host, port)
    sys.stdout.write(f"{READY}{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    for field in fields(Behaviour):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=json.loads, default=field.default)
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    try:
        import uvloop

        run: Callable[..., Any] = uvloop.run
    except ImportError:
        run = asyncio.run
    run(_serve(Behaviour(**given), host, port))


if __name__ == "__main__":
    main()
