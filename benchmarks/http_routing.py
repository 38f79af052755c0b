"""Compares the server's own routing and exchange with Starlette's, on one core.

Usage: python benchmarks/http_routing.py [--rounds 7] [--seconds 2] [--output results.json]

    routing    an ASGI application is called in this process; its handlers answer with four bytes
    requests   clients in a closed loop POST a completion request, which is parsed and checked, and answered with a body
               of fixed bytes; over loopback
    streams    the whole server over a fake engine (see server_front.py); one token of each stream a step

Variants:

    headrace   App, Exchange and EventStream
    starlette  Starlette's router, Request, Response and StreamingResponse; all else is the same code
    mixed      Starlette's router before our handlers, Exchange and EventStream

Every variant has a process of its own on the same core and runs behind the same gate and uvicorn protocol. Rounds are
interleaved; the figures are medians. The CPU time of the server's process is what to compare: neighbours on the machine
disturb it least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import server_front as front
from about import commit, cpu_name

PATH = "/v1/completions"
ANSWER_END = b'"end":1}'
ANSWER = (
    b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" tok","logprobs":null}],' + ANSWER_END
)
VARIANTS = ("headrace", "starlette", "mixed")
PIPELINE = 32  # connections of the closed loop
ROUTED = {
    "first in the list": ("POST", "/v1/chat/completions", 200),
    "last in the list": ("POST", "/admin/reset_prefix_cache", 200),
    "with a parameter": ("GET", "/v1/models/some/model", 200),
    "not there": ("GET", "/nowhere", 404),
}


# ---- the applications


def null_metrics() -> Any:
    return SimpleNamespace(answered=lambda *args: None, refused=lambda *args: None)


def with_handlers(handler: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Our routes, all with the same handler."""
    from headrace.server import endpoints

    endpoints.ROUTES = tuple(replace(route, handler=handler) for route in endpoints.ROUTES)


def headrace_app(services: Any, routes: Any = None) -> Any:
    """`routes`: as `serve` gives them."""
    from headrace.server import endpoints
    from headrace.server.http.app import App

    return App(services, endpoints.ROUTES)


def starlette_routes(endpoint_of: Callable[[str], Any], *, is_asgi: bool) -> list[Any]:
    """The same paths as ours. An ASGI endpoint is an object, which Starlette calls without a Request."""
    from starlette.routing import Route

    from headrace.server.endpoints import ROUTES

    routes = [
        Route(ours.path.replace("{model}", "{model:path}"), endpoint_of(ours.path), methods=[ours.method])
        for ours in ROUTES
    ]
    assert is_asgi or all(callable(route.endpoint) for route in routes)
    return routes


def starlette_app(services: Any, endpoint: Any) -> Any:
    """Starlette with our error bodies."""
    from starlette.applications import Starlette
    from starlette.responses import Response

    from headrace.errors import HeadraceError
    from headrace.server.http.errors import error_body, from_headrace

    async def failed(request: Any, error: Exception) -> Response:
        answer = from_headrace(error)
        return Response(error_body(answer), answer.status, answer.headers, media_type="application/json")

    return Starlette(
        routes=starlette_routes(lambda path: endpoint, is_asgi=False), exception_handlers={HeadraceError: failed}
    )


class OurHandler:
    """Calls one of our handlers from Starlette's router."""

    def __init__(self, services: Any, handler: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._services = services
        self._handler = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from headrace.errors import HeadraceError
        from headrace.server.http.errors import from_headrace
        from headrace.server.http.exchange import Exchange

        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(self._services, exchange)
        except HeadraceError as error:
            await exchange.fail(from_headrace(error))


def mixed_app(services: Any, routes: Any = None) -> Any:
    from starlette.applications import Starlette

    from headrace.server.endpoints import ROUTES

    def endpoint_of(path: str) -> OurHandler:
        return OurHandler(services, next(route.handler for route in ROUTES if route.path == path))

    return Starlette(routes=starlette_routes(endpoint_of, is_asgi=True))


# ---- requests: parsed, and answered with fixed bytes


async def null_completion(services: Any, exchange: Any) -> None:
    from headrace.openai.body import read
    from headrace.openai.schema.completions import CompletionRequest

    read(CompletionRequest, await exchange.read_body(1 << 20))
    await exchange.reply(200, ANSWER)


async def null_completion_in_starlette(request: Any) -> Any:
    from starlette.responses import Response

    from headrace.openai.body import read
    from headrace.openai.schema.completions import CompletionRequest
    from headrace.server.http.errors import ApiError

    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON")
    read(CompletionRequest, await request.body())
    return Response(ANSWER, media_type="application/json")


def request_app(variant: str) -> Any:
    services = SimpleNamespace(metrics=null_metrics(), num_in_flight=0)
    with_handlers(null_completion)
    if variant == "starlette":
        return starlette_app(services, null_completion_in_starlette)
    return mixed_app(services) if variant == "mixed" else headrace_app(services)


# ---- streams: our own endpoint, written again for StreamingResponse


def starlette_completion(services: Any) -> Any:
    """`create_completion` for one streamed prompt: the same calls, but for Exchange and EventStream."""
    from starlette.responses import StreamingResponse

    from headrace.server.endpoints import completions as ours
    from headrace.server.http.sse import DONE

    async def complete(request: Any) -> StreamingResponse:
        arrived = time.monotonic()
        body = await request.body()
        asked = ours.read(ours.CompletionRequest, body)
        ours.check_model(services, asked.model)
        prompts = ours.as_prompts(asked.prompt)
        limit = ours.completion_limit(asked)
        params = ours._params(asked, services, limit, num_prompts=1)
        # Starlette watches for a client that leaves itself, so that the exchange has nothing to watch.
        exchange = SimpleNamespace(scope=request.scope, watched_by=lambda event_queue, deadline_s: nullcontext())

        async def events() -> AsyncIterator[bytes]:
            with services.queue.reserve(1, num_body_bytes=len(body)) as reservation:
                compiled = await services.engine.compiled(params)
                tokenized = await ours.tokenize(services.engine.reader, prompts, add_special_tokens=True)
                reply = ours.CompletionReply(asked, services, tokenized, ours.new_id("cmpl-", asked.request_id))
                one = ours.prepared(services, exchange, asked, tokenized[0], compiled, f"{reply.id}-0", priority=0)
                async with ours.running(services, exchange, [one], reservation, arrived=arrived) as stream:
                    writer = ours.CompletionChunks(reply, asked, stream.requests, usage_is_null=False)
                    while not stream.is_finished:
                        if written := b"".join(map(writer.write, await stream.deltas())):
                            yield written
                    yield DONE

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    return complete


def stream_app(variant: str) -> Callable[[Any], Any]:
    if variant == "starlette":
        return lambda services, routes: starlette_app(services, starlette_completion(services))
    return mixed_app if variant == "mixed" else headrace_app


# ---- the servers' processes


def serve_requests(core: int, variant: str, is_realtime: bool, pipe: Any) -> None:
    front.take_core(core, is_realtime)
    import uvicorn

    from headrace.server.endpoints import ROUTES
    from headrace.server.http.gate import Gate
    from headrace.server.http.keys import Keys
    from headrace.server.http.lifecycle import run_on_uvloop, uvicorn_config
    from headrace.server.http.routes import Router
    from headrace.server.options import ServerOptions

    options = ServerOptions()
    gate = Gate(
        request_app(variant),
        options,
        Keys(options, environ={}, print_line=print),
        public_paths=Router(ROUTES).public_paths,
    )
    server = uvicorn.Server(uvicorn_config(gate, options, lambda reason: None))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    pipe.send(listener.getsockname()[1])

    def obey() -> None:
        while pipe.recv() == "cpu":
            pipe.send(time.process_time())

    async def run() -> int:
        await server.serve(sockets=[listener])
        return 0

    threading.Thread(target=obey, daemon=True).start()
    run_on_uvloop(run())


def serve_streams(core: int, variant: str, is_realtime: bool, times_path: str, num_streams: int, pipe: Any) -> None:
    from headrace.server import serve

    serve.App = stream_app(variant)
    front.serve(core, is_realtime, times_path, num_streams, pipe)


@contextmanager
def processes(target: Callable[..., None], core: int, *args: Any) -> Any:
    """A server for each variant: the pipe to it and its port."""
    context = multiprocessing.get_context("spawn")
    started, servers = [], {}
    try:
        for variant in VARIANTS:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(core, variant, *args, theirs), daemon=True)
            process.start()
            started.append(process)
            servers[variant] = (ours, ours.recv())
        time.sleep(1.0)
        yield servers
    finally:
        for process in started:
            process.terminate()
            process.join()


# ---- measured


def measure_routing(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of CPU for a call of the application, by path."""

    async def four_bytes(services: Any, exchange: Any) -> None:
        await exchange.reply(200, b"true")

    async def four_bytes_in_starlette(request: Any) -> Any:
        from starlette.responses import Response

        return Response(b"true", media_type="application/json")

    with_handlers(four_bytes)
    services = SimpleNamespace(metrics=null_metrics(), num_in_flight=0)
    apps = {
        "headrace": headrace_app(services),
        "starlette": starlette_app(services, four_bytes_in_starlette),
        "mixed": mixed_app(services),
    }
    found: dict[str, dict[str, list[float]]] = {name: {variant: [] for variant in VARIANTS} for name in ROUTED}
    for _ in range(rounds):
        for name, (method, path, status) in ROUTED.items():
            for variant, app in apps.items():
                found[name][variant].append(asyncio.run(called(app, method, path, status)))
    return found


async def called(app: Any, method: str, path: str, status: int, times: int = 4000) -> float:
    statuses = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    base = {
        "type": "http",
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "headrace": {"is_admin": True},  # what the gate sets for the admin key
    }
    for _ in range(200):
        await app(dict(base), receive, send)
    began = time.process_time()
    for _ in range(times):
        await app(dict(base), receive, send)
    took = time.process_time() - began
    assert set(statuses) == {status}, f"{path}: {set(statuses)}"
    return 1e6 * took / times


class ClosedLoopClient(asyncio.Protocol):
    """Asks again as soon as it is answered."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._got = b""
        self.num_answered = 0
        self.is_asking = True

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._got.endswith(ANSWER_END):
            assert self._got.startswith(b"HTTP/1.1 200"), self._got
            self._got = b""
            self.num_answered += 1
            if self.is_asking:
                self._transport.write(self._request)


async def measure_requests(pipe: Any, port: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    request = front.request_bytes(PATH, 1, is_streamed=False)
    opened = [
        await loop.create_connection(lambda: ClosedLoopClient(request), "127.0.0.1", port) for _ in range(PIPELINE)
    ]
    clients = [client for _, client in opened]
    await asyncio.sleep(0.3)
    cpu, began = front.ask(pipe, "cpu"), time.monotonic()
    before = sum(client.num_answered for client in clients)
    await asyncio.sleep(seconds)
    num = sum(client.num_answered for client in clients) - before
    took, cpu = time.monotonic() - began, front.ask(pipe, "cpu") - cpu
    for transport, client in opened:
        client.is_asking = False
        transport.close()
    return {"requests_per_s": num / took, "cpu_us_per_request": 1e6 * cpu / num}


def all_requests(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {variant: {} for variant in VARIANTS}
    with processes(serve_requests, args.server_core, args.realtime) as servers:
        for _ in range(args.rounds):
            for variant, (pipe, port) in servers.items():
                one = asyncio.run(measure_requests(pipe, port, args.seconds))
                for name, value in one.items():
                    found[variant].setdefault(name, []).append(value)
    return found


def all_streams(args: argparse.Namespace, num_streams: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {variant: {} for variant in VARIANTS}
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(num_streams * front.MAX_TOKENS * 8)
        times = np.memmap(file.name, np.float64, "r", shape=(front.MAX_TOKENS, num_streams))
        with processes(serve_streams, args.server_core, args.realtime, file.name, num_streams) as servers:
            for _ in range(args.rounds):
                for variant, (pipe, port) in servers.items():
                    measuring = front.measure(
                        PATH, port, pipe, times, streams=num_streams, rate=args.rate, seconds=args.seconds
                    )
                    one = asyncio.run(asyncio.wait_for(measuring, 60.0))
                    kept = ("tokens_per_s", "cpu_us_per_token", "latency_p50_ms", "latency_p99_ms")
                    for name in kept:
                        found[variant].setdefault(name, []).append(getattr(one, name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--rate", type=float, default=20_000.0, help="tokens a second that the fake engine gives")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--realtime", action="store_true", help="schedule all processes before all neighbours")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    front.take_core(args.client_core, args.realtime)
    requests = all_requests(args)
    show("requests", requests)
    streams = {}
    for num in args.streams:
        streams[str(num)] = all_streams(args, num)
        show(f"{num} streams", streams[str(num)])
    front.take_core(args.server_core, args.realtime)
    routing = measure_routing(args.rounds)
    for name, by_variant in routing.items():
        show(f"routing, {name}", {variant: {"cpu_us": values} for variant, values in by_variant.items()})
    if args.output is not None:
        args.output.write_text(json.dumps(record(args, routing, requests, streams), indent=2) + "\n")


def show(title: str, found: dict[str, dict[str, list[float]]]) -> None:
    print(title)
    for variant, values in found.items():
        shown = ", ".join(f"{name} {median(all_values):,.2f}" for name, all_values in values.items())
        print(f"    {variant:<12}{shown}", flush=True)


def record(args: argparse.Namespace, routing: Any, requests: Any, streams: Any) -> dict[str, Any]:
    def both(values: dict[str, list[float]]) -> dict[str, Any]:
        return {
            name: {"median": round(median(raw), 3), "raw": [round(value, 3) for value in raw]}
            for name, raw in values.items()
        }

    return {
        "command": f"python benchmarks/http_routing.py {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("starlette", "uvicorn", "uvloop", "httptools", "msgspec")},
        },
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "realtime": args.realtime,
        "connections_of_the_closed_loop": PIPELINE,
        "offered_tokens_per_s": args.rate,
        "routing_cpu_us": {name: both(by_variant) for name, by_variant in routing.items()},
        "requests": {variant: both(values) for variant, values in requests.items()},
        "streams": {
            num: {variant: both(values) for variant, values in found.items()} for num, found in streams.items()
        },
    }


if __name__ == "__main__":
    main()
