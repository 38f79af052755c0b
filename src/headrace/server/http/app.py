"""The ASGI application: routes, and the edge at which every error becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from headrace.errors import EngineDeadError, HeadraceError
from headrace.server.endpoints import admin, chat, completions, models, openapi, responses, status, tokenize
from headrace.server.http.errors import ApiError, ClientGoneError, from_headrace, internal_error
from headrace.server.http.exchange import Exchange, Receive, Scope, Send
from headrace.server.services import Services

__all__ = ["App", "Services"]

Handler = Callable[[Services, Exchange], Awaitable[None]]

ROUTES: dict[str, dict[str, Handler]] = {
    "/v1/chat/completions": {"POST": chat.create_chat_completion},
    "/v1/completions": {"POST": completions.create_completion},
    "/v1/responses": {"POST": responses.create_response},
    "/v1/models": {"GET": models.list_models},
    "/tokenize": {"POST": tokenize.tokenize_text},
    "/detokenize": {"POST": tokenize.detokenize},
    "/tokenizer_info": {"GET": tokenize.tokenizer_info},
    "/health": {"GET": status.health},
    "/ready": {"GET": status.ready},
    "/version": {"GET": status.version},
    "/load": {"GET": status.load},
    "/metrics": {"GET": status.metrics},
    "/openapi.json": {"GET": openapi.show},
    "/admin/info": {"GET": admin.info},
    "/admin/drain": {"POST": admin.drain},
    "/admin/reload_keys": {"POST": admin.reload_keys},
    "/admin/reset_prefix_cache": {"POST": admin.reset_prefix_cache},
}
GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})

log = logging.getLogger("headrace.server")


class App:
    """The callable behind the gate."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the lifespan and websockets are not for the application"
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGoneError:
            pass
        except HeadraceError as error:
            await self._fail(exchange, error)
        except Exception as error:  # the server's edge: one request's fault is no other's
            # The traceback without the message, which may hold what the client sent.
            log.error("%s in %s", type(error).__name__, _route(exchange), exc_info=_without_message(error))
            await exchange.fail(internal_error())
        finally:
            if exchange.status is not None:
                self._services.metrics.answered(_route(exchange), scope["method"], exchange.status)

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path.startswith(admin.PREFIX):
            admin.check(exchange)
        handler = _handler(exchange)
        if exchange.path not in GENERATES:
            await handler(self._services, exchange)
            return
        self._services.num_in_flight += 1
        try:
            await handler(self._services, exchange)
        finally:
            self._services.num_in_flight -= 1

    async def _fail(self, exchange: Exchange, error: HeadraceError) -> None:
        answer = from_headrace(error)
        if isinstance(error, EngineDeadError) and exchange.has_begun:
            answer.status = 500
        if exchange.path in GENERATES and not exchange.has_begun:
            self._services.metrics.refused(_reason(answer))
        await exchange.fail(answer)


def _handler(exchange: Exchange) -> Handler:
    path, method = exchange.path, exchange.scope["method"]
    methods = ROUTES.get(path)
    if methods is None and path.startswith(models.PREFIX) and path != models.PREFIX:
        methods = {"GET": models.show_model}
    if methods is None:
        raise ApiError(404, f"there is no route {_shown(path)}; /openapi.json lists them", code="not_found")
    handler = methods.get(method)
    if handler is None:
        allowed = ", ".join(methods)
        raise ApiError(405, f"{_shown(path)} takes {allowed}", code="method_not_allowed", headers={"Allow": allowed})
    return handler


def _reason(error: ApiError) -> str:
    """The name of a refusal in metrics."""
    if error.status in (429, 503, 504) and error.code is not None:
        return error.code
    return "validation" if error.status < 500 else "error"


def _route(exchange: Exchange) -> str:
    return exchange.path if exchange.path in ROUTES else "another route"


def _shown(path: str) -> str:
    return path if len(path) <= 80 else f"{path[:80]}…"


def _without_message(error: BaseException) -> BaseException:
    """The same traceback under an error of the same name that says nothing."""
    return Exception(type(error).__name__).with_traceback(error.__traceback__)
