"""The ASGI application: finds the route, and turns every error into an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

from headrace.errors import EngineDeadError, HeadraceError
from headrace.server.http.errors import ApiError, ClientGoneError, from_headrace, internal_error, without_message
from headrace.server.http.exchange import Exchange, Receive, Scope, Send
from headrace.server.http.routes import ADMIN_PREFIX, Route, Router
from headrace.server.load_report import load_headers
from headrace.server.services import Services

__all__ = ["App", "Services"]

log = logging.getLogger("headrace.server")


class App:
    """The ASGI application behind the gate. The routes are given to it: this package imports no endpoint."""

    def __init__(self, services: Services, routes: Iterable[Route]) -> None:
        self._services = services
        self._router = Router(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the lifespan and websockets are not for the application"
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGoneError:
            pass
        except HeadraceError as error:
            await self._fail(exchange, error)
        except Exception as error:  # the server's edge: an error in one request must not affect others
            # The traceback without the message, which may hold what the client sent.
            log.error("%s in %s", type(error).__name__, self._handler_name(exchange), exc_info=without_message(error))
            await exchange.fail(internal_error())
        finally:
            if exchange.status is not None:
                self._services.metrics.answered(self._handler_name(exchange), scope["method"], exchange.status)

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path.startswith(ADMIN_PREFIX + "/"):
            _check_is_admin(exchange)
        route = self._router.find(exchange.path, exchange.scope["method"])
        if not route.generates:
            await route.handler(self._services, exchange)
            return
        self._services.num_in_flight += 1
        exchange.load_report = partial(load_headers, self._services, exchange)
        try:
            await route.handler(self._services, exchange)
        finally:
            self._services.num_in_flight -= 1

    async def _fail(self, exchange: Exchange, error: HeadraceError) -> None:
        answer = from_headrace(error)
        if isinstance(error, EngineDeadError) and exchange.has_begun:
            answer.status = 500
        if self._router.generates(exchange.path) and not exchange.has_begun:
            self._services.metrics.refused(_reason(answer))
        await exchange.fail(answer)

    def _handler_name(self, exchange: Exchange) -> str:
        """The path as a label of metrics, which has few values."""
        return exchange.path if self._router.has(exchange.path) else "another route"


def _check_is_admin(exchange: Exchange) -> None:
    """The gate has checked the key. Without a gate there is no admin."""
    if not exchange.scope.get("headrace", {}).get("is_admin"):
        raise ApiError(404, "there is no such route", code="not_found")


def _reason(error: ApiError) -> str:
    """The name of a refusal in metrics."""
    if error.status in (429, 503, 504) and error.code is not None:
        return error.code
    return "validation" if error.status < 500 else "error"
