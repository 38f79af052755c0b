"""A real server for tests: the application on uvicorn, on a free port, over a tiny model or a given engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx2
import uvicorn

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core import EngineStats
from headrace.errors import HeadraceError
from headrace.monitor.times import RequestTimes
from headrace.server.endpoints import ROUTES
from headrace.server.http.app import App, Services
from headrace.server.http.lifecycle import uvicorn_config
from headrace.server.options import ServerOptions

MODEL = "tiny"
TEST_TIMEOUT_S = 60.0


class Full(HeadraceError):
    """The error of a full queue."""

    def __init__(self) -> None:
        super().__init__("the queue is full; try again later")
        self.reason = "queue_full"
        self.retry_after_s = 7
        self.status = 503


@dataclass
class FakeReservation:
    owner: FakeRequestQueue
    num_requests: int
    num_estimated: int = 0
    num_tokens: int = 0
    is_started: bool = False
    is_released: bool = False

    def count_tokens(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def started(self) -> None:
        self.is_started = True

    def release(self) -> None:
        self.is_released = True

    def __enter__(self) -> FakeReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass
class FakeRequestQueue:
    is_full: bool = False
    reservations: list[FakeReservation] = field(default_factory=list)
    oldest_wait_s: float = 0.0
    usage: float | None = None
    num_in_flight: int = 0

    def reserve(self, num_requests: int = 1, *, num_tokens: int = 0) -> FakeReservation:
        if self.is_full:
            raise Full
        self.reservations.append(FakeReservation(self, num_requests, num_estimated=num_tokens))
        return self.reservations[-1]

    @property
    def num_open(self) -> int:
        return sum(not one.is_released for one in self.reservations)


@dataclass
class FakeMetrics:
    refusals: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    times: list[RequestTimes] = field(default_factory=list)
    statuses: list[tuple[str, str, int]] = field(default_factory=list)
    num_received: int = 0
    num_restarts: int = 0

    def received(self, *, n: int, max_tokens: int | None) -> None:
        self.num_received += 1

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def finished(self, times: RequestTimes, reason: str) -> None:
        self.reasons.append(reason)
        self.times.append(times)

    def first_token(self, seconds: float, *, engine: int = 0) -> None:
        pass

    def answered(self, handler: str, method: str, status: int) -> None:
        self.statuses.append((handler, method, status))

    def oldest_wait(self, seconds: float) -> None:
        pass

    def queue_usage(self, share: float | None) -> None:
        pass

    def sleeping(self, level: int) -> None:
        pass

    def restarted(self, *, engine: int = 0) -> None:
        self.num_restarts += 1

    def observe(self, *each: EngineStats | None) -> None:
        pass

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        return b"headrace:up 1\n", "text/plain; version=0.0.4"


@dataclass
class FakeState:
    is_ready: bool = True
    is_alive: bool = True

    def refuse_reason(self) -> str | None:
        return None if self.is_ready else "draining"

    def going_to_sleep(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class Server:
    """A running server, for use on the test's thread."""

    url: str
    port: int
    services: Services
    queue: FakeRequestQueue
    metrics: FakeMetrics
    state: FakeState
    loop: asyncio.AbstractEventLoop
    http: httpx2.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post(self.url + path, json=body, **options)

    def get(self, path: str) -> httpx2.Response:
        return self.http.get(self.url + path)

    def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Post the body, check that the error has OpenAI's shape, and return it."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    def chunks(self, path: str, body: Any) -> list[dict[str, Any]]:
        """Post the body as a stream and return its chunks, without the final [DONE]."""
        lines = self.post(path, body | {"stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Call on the server's event loop and return the result."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TEST_TIMEOUT_S)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, checked on the event loop."""

        async def watch() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(watch(), TEST_TIMEOUT_S), self.loop).result(TEST_TIMEOUT_S)

    @property
    def is_idle(self) -> bool:
        stats = self.services.engine.stats.scheduler
        return not (stats.num_running or stats.num_waiting or stats.num_blocks_held)


Start = Callable[[], AsyncEngine]


@contextmanager
def serving(
    model: str | None = None, *, start: Start | None = None, options: ServerOptions | None = None, **settings: Any
) -> Iterator[Server]:
    engine = start() if start is not None else AsyncEngine(model or "", **settings)
    queue, metrics, state = FakeRequestQueue(), FakeMetrics(), FakeState()
    services = Services(
        engine=engine,
        options=options or ServerOptions(),
        queue=queue,
        metrics=metrics,
        model_name=MODEL,
        state=state,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = listener.getsockname()[1]
    config = uvicorn_config(App(services, ROUTES), services.options, lambda reason: None)
    with running_server(uvicorn.Server(config), listener) as loop, httpx2.Client(timeout=TEST_TIMEOUT_S) as http:
        yield Server(f"http://127.0.0.1:{port}", port, services, queue, metrics, state, loop, http)
    asyncio.run(engine.close())


@contextmanager
def running_server(server: uvicorn.Server, listener: socket.socket) -> Iterator[asyncio.AbstractEventLoop]:
    loops: list[asyncio.AbstractEventLoop] = []
    is_up = threading.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        loops[0].call_soon(is_up.set)
        await server.serve(sockets=[listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="server")
    thread.start()
    is_up.wait()
    try:
        yield loops[0]
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
        listener.close()
