"""`DynamicBatcher.app()`: any batched callable as a small HTTP service, with /predict, /health and /metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import ConfigError, HeadraceError, RequestError
from headrace.monitor.batcher_metrics import BatcherMetrics
from headrace.server.http.errors import ApiError, ClientGoneError, from_headrace, internal_error
from headrace.server.http.exchange import Exchange, Receive, Scope, Send

if TYPE_CHECKING:
    from headrace.batching import DynamicBatcher

METHODS = {"/predict": "POST", "/health": "GET", "/metrics": "GET"}

log = logging.getLogger("headrace.server")


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    input: Any


class BatcherApp:
    """The ASGI application. The lifespan closes the batcher: waiting items are answered first."""

    def __init__(
        self, batcher: DynamicBatcher[Any, Any], *, parse: Callable[[Any], Any] | None, max_body_bytes: int
    ) -> None:
        if isinstance(max_body_bytes, bool) or not isinstance(max_body_bytes, int) or max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be a whole number from 1, got {max_body_bytes!r}")
        self._batcher = batcher
        self._parse = parse
        self._max_body_bytes = max_body_bytes
        self._metrics = BatcherMetrics(lambda: batcher.stats)
        self._logged: BaseException | None = None  # one exception reaches every item of its batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"this application serves HTTP, not {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange, receive)
        except ClientGoneError:
            pass
        except Exception as error:  # the server's edge: also what the user's callable raised
            answer = _as_answer(error)
            if answer.status == 500 and error is not self._logged:
                self._logged = error
                log.error("the batched callable failed", exc_info=error)
            await exchange.fail(answer)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._batcher.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, exchange: Exchange, receive: Receive) -> None:
        method = METHODS.get(exchange.path)
        if method is None:
            raise ApiError(404, f"there is no such route; there are {', '.join(METHODS)}", code="not_found")
        if exchange.scope["method"] != method:
            raise ApiError(405, f"{exchange.path} takes {method}", code="method_not_allowed", headers={"Allow": method})
        if exchange.path == "/predict":
            await self._predict(exchange, receive)
        elif exchange.path == "/metrics":
            body, content_type = self._metrics.render()
            await exchange.reply(200, body, content_type=content_type)
        elif self._batcher.is_closed:
            raise ApiError(503, "the batcher is closed", type="server_error", code="closed")
        else:
            await exchange.reply(200, b'{"status":"ok"}')

    async def _predict(self, exchange: Exchange, receive: Receive) -> None:
        item = self._item(await exchange.read_body(self._max_body_bytes))
        future = self._batcher.submit(item)
        watching = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((future, watching), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientGoneError("the client has disconnected")
            result = future.result()
        finally:
            watching.cancel()
            future.cancel()  # takes it out of the queue; nothing happens if it is done
        await exchange.reply(200, msgspec.json.encode({"output": result}, enc_hook=_plain))

    def _item(self, body: bytes) -> Any:
        try:
            given = msgspec.json.decode(body, type=_Input).input
        except msgspec.MsgspecError as error:
            raise ApiError(400, f'the body must be like {{"input": ...}}: {error}', code="invalid_json") from None
        if self._parse is None:
            return given
        try:
            return self._parse(given)
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the input is refused: {error}", param="input") from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_answer(error: Exception) -> ApiError:
    match error:
        case RequestError(code="queue_full" | "closed"):
            again = {"Retry-After": "1"}
            return ApiError(503, str(error), type="overloaded_error", code=error.code, headers=again)
        case RequestError(code="request_too_large"):
            return ApiError(413, str(error), code=error.code)
        case HeadraceError():
            return from_headrace(error)
    return internal_error()


def _plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the callable returned {type(value).__name__}, which is not JSON; return lists, numbers or text")
