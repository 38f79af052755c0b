"""The state of the server: /health, /ready, /version, /load and /metrics."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.self_monitor import refresh_metrics
from headrace.server.services import Services
from headrace.version import __version__


async def health(services: Services, exchange: Exchange) -> None:
    """200 while the engine runs or is being restarted; 503 if only a restart of the server helps."""
    if not services.state.is_alive:
        raise ApiError(503, "the engine has stopped", type="server_error", code="engine_dead")
    await exchange.reply(200, b'{"status":"ok"}')


async def ready(services: Services, exchange: Exchange) -> None:
    """Whether new requests are taken."""
    if not services.state.is_ready:
        reason = services.state.refuse_reason() or "not_ready"
        raise ApiError(503, f"not ready: {reason}", type="server_error", code=reason, headers={"Retry-After": "1"})
    await exchange.reply(200, b'{"status":"ready"}')


async def version(services: Services, exchange: Exchange) -> None:
    await exchange.reply(200, msgspec.json.encode({"version": __version__}))


async def load(services: Services, exchange: Exchange) -> None:
    await exchange.reply(200, msgspec.json.encode({"server_load": services.num_in_flight}))


async def metrics(services: Services, exchange: Exchange) -> None:
    refresh_metrics(services)
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    body, content_type = await asyncio.to_thread(services.metrics.render, accept)
    await exchange.reply(200, body, content_type=content_type)
