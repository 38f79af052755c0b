"""The whole server with a small model on a free port, for tests in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx2

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.client import Client, Deliver
from headrace.engine.start import Engine, start_engine
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import open_listener
from headrace.server.options import ServerOptions
from headrace.server.serve import Server
from tests.server.live import run, until

PROMPT = "The same forty characters of every prompt"  # two full blocks and more


class LimitedEngine(AsyncEngine):
    """An engine whose number of running sequences a test can limit."""

    client: Client

    @classmethod
    def of(cls, config: EngineConfig) -> LimitedEngine:
        started: list[Engine] = []

        def start(deliver: Deliver) -> Engine:
            started.append(start_engine(config, deliver))
            return started[0]

        made = cls.over(start)
        assert isinstance(made, LimitedEngine)
        made.client = started[0].client
        return made


@dataclass
class Running:
    server: Server
    engine: AsyncEngine
    client: httpx2.AsyncClient
    exit: asyncio.Task[int]
    printed: list[str]

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        asked = {"prompt": PROMPT, "max_tokens": 2, **body}
        return await self.client.post("/v1/completions", json=asked, headers=headers)


@asynccontextmanager
async def running(
    engine: AsyncEngine,
    environ: dict[str, str] | None = None,
    *,
    clock: Callable[[], float] = monotonic,
    **options: Any,
) -> AsyncIterator[Running]:
    printed: list[str] = []
    made = ServerOptions(**{"port": 0, **options})
    keys = Keys(made, environ=environ or {}, print_line=printed.append)
    server = Server(engine, made, keys, model_name="tiny", print_line=printed.append, clock=clock)
    listener = open_listener(made)
    exit = asyncio.create_task(server.lifecycle.run(listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await until(lambda: server.lifecycle.is_started)
    async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client:
        try:
            yield Running(server, engine, client, exit, printed)
        finally:
            if isinstance(engine, LimitedEngine):
                engine.client.limit_running(None)
            if not exit.done():
                server.lifecycle.stop()
            await exit


def with_server(engine: AsyncEngine, body: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def call() -> None:
        async with running(engine, **options) as made:
            await body(made)

    run(call)


def waiting(made: Running, number: int) -> Callable[[], bool]:
    """A condition: this many sequences wait in the engine's queue."""
    return lambda: made.engine.stats.scheduler.num_waiting == number
