"""Control routes, for whoever has the admin key: what the server runs with, and what signals can do too."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import msgspec

from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.options import ServerOptions
from headrace.server.services import Control, Services
from headrace.version import __version__

PREFIX = "/admin/"
_SECRET = ("api_key", "admin_key")


def check(exchange: Exchange) -> None:
    """The gate has asked for the key; without a gate nobody gets here."""
    if not exchange.scope.get("headrace", {}).get("is_admin"):
        raise ApiError(404, "there is no such route", code="not_found")


async def info(services: Services, exchange: Exchange) -> None:
    settings = services.engine.settings
    await _reply(
        exchange,
        {
            "version": __version__,
            "model": services.model_name,
            "phase": services.state.refuse_reason() or "ready",
            "num_in_flight": services.num_in_flight,
            "num_engine_restarts": services.engine.num_restarts,
            "engine": {one.name: getattr(settings, one.name) for one in fields(settings) if one.name != "choices"},
            "reasons": {choice.name: choice.reason for choice in settings.choices},
            "server": _shown(services.options),
        },
    )


async def drain(services: Services, exchange: Exchange) -> None:
    """As SIGTERM does. Asked again, it changes nothing; only a second signal hurries."""
    _control(services).drain()
    await _reply(exchange, {"status": "draining", "num_in_flight": services.num_in_flight}, status=202)


async def reload_keys(services: Services, exchange: Exchange) -> None:
    """As SIGHUP does."""
    if not _control(services).reload_keys():
        raise ApiError(
            500, "the keys stay as they were; the server's log says why", type="server_error", code="keys_not_read"
        )
    await _reply(exchange, {"status": "ok"})


async def reset_prefix_cache(services: Services, exchange: Exchange) -> None:
    """What running requests hold stays until they end."""
    services.engine.forget_prefixes()
    await _reply(exchange, {"status": "ok"})


def _control(services: Services) -> Control:
    assert services.control is not None, "a server without control has no admin"
    return services.control


def _shown(options: ServerOptions) -> dict[str, Any]:
    """Whether there is a secret, never which."""
    shown = asdict(options)
    return shown | {name: None if shown[name] is None else "set" for name in _SECRET}


async def _reply(exchange: Exchange, body: dict[str, Any], *, status: int = 200) -> None:
    await exchange.reply(status, msgspec.json.encode(body))
