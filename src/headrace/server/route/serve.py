"""Runs a router: builds its parts, serves, and returns the exit code."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from time import monotonic

from headrace.server.http.gate import Gate
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import (
    BACKLOG,
    Lifecycle,
    PrintLine,
    address_of,
    check_tls,
    open_listener,
    raise_file_limit,
    run_on_uvloop,
)
from headrace.server.route.app import PUBLIC_PATHS, RouteApp
from headrace.server.route.fleet import SCRAPE_INTERVAL_S, Fleet
from headrace.server.route.options import RouteOptions
from headrace.server.route.sources import Sources
from headrace.server.state import ServerState

log = logging.getLogger("headrace.server")


def serve_route(options: RouteOptions, sources: Sources, *, api_key: str | None = None, print_line: PrintLine) -> int:
    """Route until a signal. `api_key` is for the /metrics of replicas that need one."""
    server_options = options.server_options()
    check_tls(server_options)
    raise_file_limit()
    with open_listener(server_options) as listener:
        return run_on_uvloop(_run(options, sources, listener, api_key, print_line))


async def _run(
    options: RouteOptions, sources: Sources, listener: socket.socket, api_key: str | None, print_line: PrintLine
) -> int:
    server = RouteServer(options, sources, api_key=api_key, print_line=print_line)
    await server.fleet.refresh()
    listener.listen(BACKLOG)
    print_line(f"routing to {len(server.fleet.replicas)} replicas on {address_of(listener, options.server_options())}")
    return await server.run(listener)


class RouteServer:
    """Owns the parts of one router and connects them."""

    def __init__(
        self,
        options: RouteOptions,
        sources: Sources,
        *,
        api_key: str | None = None,
        print_line: PrintLine,
        scrape_interval_s: float = SCRAPE_INTERVAL_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        server_options = options.server_options()
        self._scrape_interval_s = scrape_interval_s
        self.state = ServerState()
        self.fleet = Fleet(
            sources,
            policy=options.policy,
            target_requests=options.target_requests,
            least_replicas=options.min_replicas,
            most_replicas=options.max_replicas,
            api_key=api_key,
            print_line=print_line,
            clock=clock,
        )
        # The clients' keys are the replicas' to check: the router has none, whatever the environment says.
        keys = Keys(server_options, environ={}, print_line=print_line)
        self.lifecycle = Lifecycle(
            Gate(RouteApp(self.fleet, self.state), server_options, keys, public_paths=PUBLIC_PATHS),
            server_options,
            self.state,
            abort_all=self._abort_all,
            reload_keys=self._reload,
            print_line=print_line,
        )

    async def run(self, listener: socket.socket) -> int:
        watching = asyncio.create_task(self.fleet.watch(self._scrape_interval_s))
        watching.add_done_callback(self._watch_ended)
        try:
            return await self.lifecycle.run(listener)
        finally:
            watching.cancel()

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        """A router that no longer sees its replicas must not go on."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            log.error("the watch of the replicas has ended", exc_info=error)
            self.lifecycle.stop()

    async def _abort_all(self) -> None:
        self.fleet.is_closed = True  # or what is lost now would be sent to another replica
        for replica in self.fleet.replicas:
            replica.lose_all("the router is stopping")

    def _reload(self) -> bool:
        """SIGHUP. The file is read again with the next scrape anyway, if it has changed."""
        return True
