"""The router as an ASGI application: requests for a model are passed on, the rest is answered here.

    POST /v1/...       to a replica                      GET /v1/models    the models of all replicas
    GET /health        the router runs                   GET /ready        a replica takes requests
    GET /metrics       for Prometheus                    GET /replicas     each replica's state, as JSON

A request is sent again, to another replica, if there was no connection, if its replica was lost before the client got
a byte, or if the replica refused it with 503. A request that has lost two replicas is given up: it may be what ends
them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import HeadraceError
from headrace.server.http.errors import ApiError, ClientGoneError, error_body, from_headrace, internal_error
from headrace.server.http.exchange import Exchange, Receive, Scope, Send
from headrace.server.route.affinity import read_prompt
from headrace.server.route.fleet import Fleet
from headrace.server.route.metrics import RouteMetrics, replicas_document
from headrace.server.route.replica import Replica, Visit
from headrace.server.route.scraping import get
from headrace.server.route.upstream import Connection, Head, LostError, NoConnectionError
from headrace.server.state import ServerState

PUBLIC_PATHS = frozenset({"/health", "/ready"})
FORWARDED = re.compile(r"/v[12]/[A-Za-z0-9/_-]+|/(tokenize|detokenize|score|rerank|pooling|classify)")
KEPT_BY_ONE = (
    "/v1/files",
    "/v1/batches",
    "/v1/uploads",
    "/v1/responses/",
)  # what is kept on one replica is unknown to the others
MAX_LOST = 2  # replicas that one request may lose
MAX_HELD = 2**20  # bytes of an answer that is no stream, kept until it is complete so that it can be asked for again
MAX_EVENT = 2**20  # bytes; an event that is longer is passed on in pieces
MODELS_TIMEOUT_S = 5.0
RETRY_AFTER = {"Retry-After": "1"}

# Headers for one connection only, and the origin, which the gate has checked. Answers are not compressed: the router
# must find the ends of events.
_NOT_SENT = frozenset(
    b"host connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade expect "
    b"content-length accept-encoding x-request-id origin".split()
)
_NOT_RETURNED = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade content-length x-request-id date server".split()
)

log = logging.getLogger("headrace.server")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the router passes it on."""

    method: bytes
    target: bytes  # path and query
    headers: bytes
    body: bytes

    def to(self, replica: Replica) -> bytes:
        pool = replica.pool
        line = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (self.method, pool.path, self.target, pool.host_header)
        return line + self.headers + b"content-length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass(frozen=True, slots=True)
class Refusal:
    """A replica's own 503, for the client if no other replica takes the request."""

    head: Head
    body: bytes
    replica: Replica


class RouteApp:
    """Behind the gate, which has checked sizes and set the request id."""

    def __init__(self, fleet: Fleet, state: ServerState) -> None:
        self._fleet = fleet
        self._state = state
        self._metrics = RouteMetrics(fleet)
        self._handlers: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/replicas": self._show_replicas,
            "/v1/models": self._list_models,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange, receive)
        except ClientGoneError:
            pass
        except HeadraceError as error:
            await exchange.fail(from_headrace(error))
        except Exception as error:  # the server's edge: an error in one request must not affect others
            log.error("%s in the router", type(error).__name__, exc_info=error)
            await exchange.fail(internal_error())

    async def _answer(self, exchange: Exchange, receive: Receive) -> None:
        path, method = exchange.path, exchange.scope["method"]
        handler = self._handlers.get(path)
        if handler is None and path.startswith("/v1/models/"):
            handler = self._show_model
        if handler is not None:
            if method not in ("GET", "HEAD"):
                raise ApiError(405, f"{path[:80]} takes GET", code="method_not_allowed", headers={"Allow": "GET"})
            await handler(exchange)
            return
        if path.startswith(KEPT_BY_ONE):
            raise ApiError(
                404, "the router does not share files, batches and stored responses; ask one server", code="not_found"
            )
        if FORWARDED.fullmatch(path) is None:
            raise ApiError(404, "the router has no such route; ask one of its replicas", code="not_found")
        if method != "POST":
            raise ApiError(405, f"{path[:80]} takes POST", code="method_not_allowed", headers={"Allow": "POST"})
        self._check_is_ready()
        await _Forwarding(self._fleet, exchange, await _read_body(receive)).run(receive)

    def _check_is_ready(self) -> None:
        """After SIGTERM, only requests in flight are answered."""
        if (reason := self._state.refuse_reason()) is not None:
            raise ApiError(503, f"not ready: {reason}", type="server_error", code=reason, headers=RETRY_AFTER)

    # ---- about the router

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        self._check_is_ready()
        num_up = sum(self._fleet.state(replica) != "out" for replica in self._fleet.replicas)
        if not num_up:
            raise no_replica(len(self._fleet.replicas))
        await exchange.reply(200, msgspec.json.encode({"status": "ready", "replicas": num_up}))

    async def _show_metrics(self, exchange: Exchange) -> None:
        body, content_type = self._metrics.render()
        await exchange.reply(200, body, content_type=content_type)

    async def _show_replicas(self, exchange: Exchange) -> None:
        await exchange.reply(200, msgspec.json.encode(replicas_document(self._fleet)))

    # ---- models

    async def _list_models(self, exchange: Exchange) -> None:
        models = await self._models(exchange)
        await exchange.reply(200, msgspec.json.encode({"object": "list", "data": list(models.values())}))

    async def _show_model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        models = await self._models(exchange)
        if name not in models:
            raise ApiError(404, f"the model {name[:80]!r} does not exist", param="model", code="model_not_found")
        await exchange.reply(200, msgspec.json.encode(models[name]))

    async def _models(self, exchange: Exchange) -> dict[str, Any]:
        """Of all replicas that answer, each once. An error of all of them, such as a wrong key, is the answer."""
        asked = [replica for replica in self._fleet.replicas if self._fleet.state(replica) != "out"]
        answers = await asyncio.gather(*(_models_of(replica, _keys_of(exchange)) for replica in asked))
        models: dict[str, Any] = {}
        for status, found in answers:
            if status == 200:
                models = {model["id"]: model for model in found} | models
        statuses = [status for status, _ in answers if status]
        if statuses and all(status in (401, 403) for status in statuses):
            raise ApiError(statuses[0], "the replicas refuse this key", type="authentication_error", code="auth")
        if not models:
            raise no_replica(len(self._fleet.replicas))
        return models


class _Forwarding:
    """One request on its way: to one replica after the other until one answers."""

    def __init__(self, fleet: Fleet, exchange: Exchange, body: bytes) -> None:
        self._fleet = fleet
        self._exchange = exchange
        self._asked = _asked(exchange, body)
        self._prompt = read_prompt(body, owner=_keys_of(exchange))
        self._tried: set[Replica] = set()
        self._num_lost = 0
        self._refusal: Refusal | None = None
        self._connection: Connection | None = None
        self._is_gone = False

    async def run(self, receive: Receive) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            while not await self._try_one():
                pass
        finally:
            watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        """A client that has gone aborts its request at the replica."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        if self._connection is not None:
            self._connection.fail(ClientGoneError("the client has disconnected"))

    async def _try_one(self) -> bool:
        """Ask one replica. Returns whether the request has its answer."""
        pick = self._fleet.pick(self._prompt.hashes, self._tried)
        if pick is None:
            await self._give_up()
            return True
        replica = pick.replica
        self._tried.add(replica)
        with replica.serving(is_probe=pick.is_probe, is_stream=self._prompt.is_stream) as visit:
            try:
                return await self._ask(replica, visit)
            except NoConnectionError as error:
                self._fleet.unreachable(replica, str(error))
                replica.outcomes["lost"] += 1
                self._fleet.num_retries["no_connection"] += 1
            except LostError as error:
                self._fleet.failed(replica, str(error))
                self._lose(replica)
        return False

    async def _give_up(self) -> None:
        """No replica is left: the answer is the last refusal, if there was one."""
        if self._refusal is None:
            raise no_replica(len(self._fleet.replicas))
        await self._reply(self._refusal.head, self._refusal.body, self._refusal.replica)

    def _lose(self, replica: Replica) -> None:
        if self._exchange.has_begun:
            raise AssertionError("a begun answer is ended, not repeated")
        replica.outcomes["lost"] += 1
        self._num_lost += 1
        if self._num_lost >= MAX_LOST:
            raise ApiError(
                502,
                f"{self._num_lost} replicas were lost while they worked on this request; it is not sent again",
                type="server_error",
                code="replica_lost",
            )
        self._fleet.num_retries["lost"] += 1

    async def _ask(self, replica: Replica, visit: Visit) -> bool:
        started = self._fleet.clock()
        async with self._answering(replica) as (connection, head):
            if head.status == 503:
                await self._take_refusal(replica, connection, head)
                return False
            first = await connection.read() if head.is_stream else b""
            visit.begin()
            replica.outcomes[f"{head.status // 100}xx"] += 1
            if head.is_stream:
                self._fleet.answered(replica, self._fleet.clock() - started)
                await self._pass_stream_on(replica, connection, head, first)
            else:
                await self._pass_body_on(replica, connection, head)
        return True

    @asynccontextmanager
    async def _answering(self, replica: Replica) -> AsyncIterator[tuple[Connection, Head]]:
        """Send the request; inside, its answer can be read. A kept connection may have been closed by the replica
        meanwhile: that is no failure."""
        request = self._asked.to(replica)
        idle, head = replica.pool.take_idle(), None
        if idle is not None:
            with replica.using(idle):
                try:
                    head = await self._send(idle, request)
                except LostError:
                    if idle.was_failed:
                        raise
                if head is not None:
                    yield idle, head
                    return
        connection = await replica.pool.connect()
        with replica.using(connection):
            yield connection, await self._send(connection, request)

    async def _send(self, connection: Connection, request: bytes) -> Head:
        if self._is_gone:
            raise ClientGoneError("the client has disconnected")
        self._connection = connection
        return await connection.ask(request)

    async def _take_refusal(self, replica: Replica, connection: Connection, head: Head) -> None:
        body = await _read_all(connection, MAX_HELD)
        self._refusal = Refusal(head, body, replica)
        self._fleet.busy(replica, _seconds(head.get(b"retry-after")))
        replica.outcomes["5xx"] += 1
        self._fleet.num_retries["busy"] += 1

    # ---- answers

    async def _pass_body_on(self, replica: Replica, connection: Connection, head: Head) -> None:
        """A whole answer at once, so that a replica that is lost meanwhile can be replaced. A long one in pieces."""
        body = b""
        while part := await connection.read():
            body += part
            if len(body) > MAX_HELD:
                await self._begin(head, replica)
                await self._pass_rest_on(replica, connection, body)
                return
        if head.status in (500, 502, 504):
            self._fleet.failed(replica, f"it answered with status {head.status}")
        else:
            self._fleet.answered(replica)
        await self._reply(head, body, replica)

    async def _pass_rest_on(self, replica: Replica, connection: Connection, body: bytes) -> None:
        try:
            while body:
                await self._exchange.send({"type": "http.response.body", "body": body, "more_body": True})
                body = await connection.read()
        except LostError as error:
            self._break(replica, error)
            # Without an end, the client sees that the body is not complete.
            raise ClientGoneError("the answer could not be completed") from None
        await self._exchange.send({"type": "http.response.body", "body": b""})

    async def _pass_stream_on(self, replica: Replica, connection: Connection, head: Head, first: bytes) -> None:
        """Whole events only: where a replica is lost in the middle of one, the error is an event of its own."""
        await self._begin(head, replica)
        send = self._exchange.send
        rest = first
        try:
            while rest:
                whole, rest = split_events(rest)
                if whole:
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                part = await connection.read()
                if not part:
                    break
                rest = rest + part if rest else part
        except LostError as error:
            self._break(replica, error)
            rest = b"data: " + error_body(_broken(replica)) + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": rest})

    def _break(self, replica: Replica, error: LostError) -> None:
        replica.outcomes["broken"] += 1
        self._fleet.failed(replica, str(error))

    async def _begin(self, head: Head, replica: Replica) -> None:
        self._exchange.status = head.status
        fields = _returned(head, replica)
        await self._exchange.send({"type": "http.response.start", "status": head.status, "headers": fields})

    async def _reply(self, head: Head, body: bytes, replica: Replica) -> None:
        self._exchange.status = head.status
        fields = [*_returned(head, replica), (b"content-length", str(len(body)).encode())]
        await self._exchange.send({"type": "http.response.start", "status": head.status, "headers": fields})
        await self._exchange.send({"type": "http.response.body", "body": body})


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """The whole events at the start of some bytes of a stream, and what follows them."""
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
    if data.endswith(b"\n\n") or len(data) > MAX_EVENT:
        return data, b""
    return (data[:end], data[end:]) if end > 3 else (b"", data)


def no_replica(num_replicas: int) -> ApiError:
    return ApiError(
        503,
        f"none of the {num_replicas} replicas can be reached and is ready; try again later",
        type="server_error",
        code="no_replica",
        headers=RETRY_AFTER,
    )


def _broken(replica: Replica) -> ApiError:
    return ApiError(
        502,
        f"the replica {replica.name} was lost in the middle of the answer; send the request again",
        type="server_error",
        code="replica_lost",
    )


def _asked(exchange: Exchange, body: bytes) -> Asked:
    scope = exchange.scope
    query = bytes(scope.get("query_string", b""))
    fields = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
    fields.append((b"x-request-id", str(scope["headrace"]["request_id"]).encode()))
    return Asked(
        method=scope["method"].encode(),
        target=exchange.path.encode() + (b"?" + query if query else b""),  # the path matches FORWARDED
        headers=b"".join(b"%b: %b\r\n" % field for field in fields),
        body=body,
    )


def _keys_of(exchange: Exchange) -> bytes:
    """The headers with the client's key, as they are sent."""
    names = (b"authorization", b"x-api-key")
    return b"".join(b"%b: %b\r\n" % field for field in exchange.scope["headers"] if field[0] in names)


def _returned(head: Head, replica: Replica) -> list[tuple[bytes, bytes]]:
    fields = [(name, value) for name, value in head.headers if name not in _NOT_RETURNED]
    return [*fields, (b"x-headrace-replica", replica.name.encode())]


async def _read_body(receive: Receive) -> bytes:
    """The gate has limited its length."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client disconnected before its request was complete")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _read_all(connection: Connection, limit: int) -> bytes:
    body = b""
    while part := await connection.read():
        body += part
        if len(body) > limit:
            raise LostError(f"the answer is longer than {limit:,} bytes")
    return body


async def _models_of(replica: Replica, keys: bytes) -> tuple[int, list[Any]]:
    """Status and models; status 0 if there is no answer that can be read."""
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            status, body = await get(replica, b"/v1/models", keys)
        found = msgspec.json.decode(body).get("data") if status == 200 else []
        return status, [model for model in found if isinstance(model, dict) and isinstance(model.get("id"), str)]
    except (HeadraceError, TimeoutError, OSError, msgspec.MsgspecError, AttributeError, TypeError):
        return 0, []


def _seconds(retry_after: bytes) -> float:
    """Of a Retry-After header; a second if there is none, or a date."""
    return float(retry_after) if retry_after.isdigit() else 1.0
