"""The server process from its socket to its exit code: uvicorn, signals, and a graceful shutdown.

first SIGTERM or SIGINT   not ready; new requests are refused; those in flight may finish within `shutdown_timeout_s`
timeout                   remaining requests are aborted, each with a last chunk, and the process ends
second signal             the same at once
SIGHUP                    the key file is read again
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager

import uvicorn
import uvloop

from headrace.errors import ConfigError, reason_of
from headrace.garbage import freeze_loaded_objects
from headrace.server.http.gate import Application
from headrace.server.http.protocol import ConnectionLimits, GuardedProtocol
from headrace.server.http.unix_socket import UnixListener
from headrace.server.options import ServerOptions
from headrace.server.state import ServerState

PrintLine = Callable[[str], None]

BACKLOG = 2048
KEEP_ALIVE_S = 60
WANTED_FILES = 65_536
SPARE_FILES = 128  # file descriptors kept for the model, logs and pipes; the rest may be connections
ABORT_S = 5.0  # for the last chunk of an aborted response
WATCH_S = 1.0  # between two checks of the engine and of the event loop lag


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class Lifecycle:
    """Owns uvicorn's server and its shutdown."""

    def __init__(
        self,
        app: Application,
        options: ServerOptions,
        state: ServerState,
        *,
        abort_all: Callable[[], Awaitable[None]],
        reload_keys: Callable[[], bool],
        has_given_up: Callable[[], bool] = lambda: False,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_lag: Callable[[float], None] = lambda seconds: None,
        background: Collection[asyncio.Task[None]] = frozenset(),
        print_line: PrintLine,
    ) -> None:
        """`background`: requests that are answered without a client, now; the collection changes."""
        self._options = options
        self._state = state
        self._abort_all = abort_all
        self._reload_keys = reload_keys
        self._has_given_up = has_given_up
        self._on_lag = on_lag
        self._background = background
        self._print_line = print_line
        self._uvicorn = _Uvicorn(uvicorn_config(app, options, on_refused))
        self._stopping: asyncio.Task[None] | None = None
        self._drain_timeout: asyncio.Timeout | None = None
        self._skips_drain = False
        self._exit_code = 0

    @property
    def is_started(self) -> bool:
        """Whether the server accepts connections."""
        return self._uvicorn.started

    @property
    def is_draining(self) -> bool:
        """Whether a stop waits for requests in flight."""
        return self._drain_timeout is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._running())

    @property
    def num_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    async def run(self, listener: socket.socket) -> int:
        """Serve until stopped. Returns the exit code."""
        with self._signals():
            watch = asyncio.create_task(self._watch_engine())
            freeze_loaded_objects()
            try:
                self._state.ready()
                await self._uvicorn.serve(sockets=[listener])
            finally:
                watch.cancel()
        return self._exit_code

    def stop(self) -> None:
        """Handle a signal: the first drains, the second aborts what is left."""
        if self._stopping is None:
            self._state.drain()
            self._stopping = asyncio.create_task(self._stop())
            return
        self._skips_drain = True
        if self._drain_timeout is not None:
            self._drain_timeout.reschedule(asyncio.get_running_loop().time())

    def drain(self) -> None:
        """Drain like the first signal; no effect if already stopping."""
        if self._stopping is None:
            self.stop()

    def reload_keys(self) -> bool:
        return self._reload_keys()

    async def _stop(self) -> None:
        num_running = self.num_in_flight
        self._print_line(f"stopping: {num_running} requests may finish within {self._options.shutdown_timeout_s:g} s")
        if not await self._finish_within(self._options.shutdown_timeout_s):
            self._exit_code = 1
            self._print_line(f"aborting {self.num_in_flight} requests")
            await self._abort_all()
            self._skips_drain = False  # also after a second signal there is time for the last chunks
            if not await self._finish_within(ABORT_S):
                for task in self._running():
                    task.cancel()
        self._uvicorn.should_exit = True

    def _running(self) -> set[asyncio.Task[None]]:
        """What a stop waits for: requests of clients, and those in the background."""
        return {*self._uvicorn.server_state.tasks, *self._background}

    async def _finish_within(self, seconds: float) -> bool:
        """Whether all requests in flight ended within that time, before a second signal."""
        try:
            async with asyncio.timeout(0 if self._skips_drain else seconds) as self._drain_timeout:
                while tasks := self._running():
                    await asyncio.wait(tasks)
        except TimeoutError:
            return False
        finally:
            self._drain_timeout = None
        return True

    async def _watch_engine(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._has_given_up():
            due = loop.time() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._on_lag(max(0.0, loop.time() - due))
        self._print_line("the engine could not be restarted; the server ends")
        if self._stopping is None:
            self.stop()
        self._exit_code = 1

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._reload_keys}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


def open_listener(options: ServerOptions) -> socket.socket:
    """A socket that is bound but not listening: a port in use is reported before the model is loaded."""
    if options.uds is not None:
        return UnixListener(options.uds)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host} port {options.port}: {reason_of(error)}; --host and --port choose another"
        ) from error
    return listener


def address_of(listener: socket.socket, options: ServerOptions) -> str:
    if options.uds is not None:
        return f"unix:{options.uds}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'http' if options.ssl_certfile is None else 'https'}://{host}:{listener.getsockname()[1]}"


def run_on_uvloop(main: Awaitable[int]) -> int:
    async def body() -> int:
        return await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(body())


def uvicorn_config(app: Application, options: ServerOptions, on_refused: Callable[[str], None]) -> uvicorn.Config:
    limits = ConnectionLimits(
        max_header_bytes=options.max_header_bytes,
        max_num_headers=options.max_num_headers,
        max_connections=options.max_connections or max_connections(),
        read_timeout_s=options.read_timeout_s,
        write_timeout_s=options.write_timeout_s,
        on_refused=on_refused,
    )
    config = uvicorn.Config(
        app,
        http=GuardedProtocol.within(limits),
        loop="uvloop",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # client addresses are not used
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(ABORT_S),
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    config.load()
    return config


def check_tls(options: ServerOptions) -> None:
    """Check the certificate and its key before the model is loaded."""
    if options.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files of --ssl-certfile and --ssl-keyfile cannot be used: {error}") from error


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as needed and allowed: where it is 1,024, connections would be
    closed before the queue is full, without a Retry-After."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED_FILES:
        limit = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def max_connections() -> int:
    """The number of connections that the open-files limit allows."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(SPARE_FILES, soft - SPARE_FILES)
