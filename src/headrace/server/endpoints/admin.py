"""Control routes, which need the admin key: the settings in use, and what signals do too."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import msgspec

from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.options import ServerOptions
from headrace.server.services import Control, Services
from headrace.version import __version__

_SECRET = ("api_key", "admin_key")


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
    """Does what SIGTERM does. A second call changes nothing; a second signal ends the drain at once."""
    _control(services).drain()
    await _reply(exchange, {"status": "draining", "num_in_flight": services.num_in_flight}, status=202)


async def reload_keys(services: Services, exchange: Exchange) -> None:
    """Does what SIGHUP does."""
    if not _control(services).reload_keys():
        raise ApiError(
            500, "the keys were not changed; the server's log says why", type="server_error", code="keys_not_read"
        )
    await _reply(exchange, {"status": "ok"})


async def reset_prefix_cache(services: Services, exchange: Exchange) -> None:
    """Blocks that running requests hold stay until they end."""
    services.engine.forget_prefixes()
    await _reply(exchange, {"status": "ok"})


def _control(services: Services) -> Control:
    assert services.control is not None, "a server without control has no admin"
    return services.control


def _shown(options: ServerOptions) -> dict[str, Any]:
    """The options, with secrets shown as set or not set."""
    shown = asdict(options)
    return shown | {name: None if shown[name] is None else "set" for name in _SECRET}


async def _reply(exchange: Exchange, body: dict[str, Any], *, status: int = 200) -> None:
    await exchange.reply(status, msgspec.json.encode(body))
