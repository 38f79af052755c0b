"""/v1/batches: OpenAI's Batch API over the jobs of this server."""

from __future__ import annotations

import asyncio

from headrace.openai.body import read
from headrace.openai.schema.batches import BatchRequest
from headrace.server.endpoints.files import as_list, batch_service, limit_of, owner_of, query, reply
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

PREFIX = "/v1/batches/"
CANCEL = "/cancel"
DEFAULT_LISTED = 20
MAX_LISTED = 100


async def create_batch(services: Services, exchange: Exchange) -> None:
    service = batch_service(services)
    request = read(BatchRequest, await exchange.read_body(services.options.max_body_bytes))
    batch = await service.create_batch(request, owner_of(exchange))
    await reply(exchange, service.shown(batch))


async def list_batches(services: Services, exchange: Exchange) -> None:
    service, given = batch_service(services), query(exchange)
    limit = limit_of(given, default=DEFAULT_LISTED, most=MAX_LISTED)
    found = await asyncio.to_thread(
        service.store.batches, owner_of(exchange), limit=limit + 1, after=given.get("after")
    )
    await reply(exchange, as_list([service.shown(batch) for batch in found], limit))


async def show_batch(services: Services, exchange: Exchange) -> None:
    service = batch_service(services)
    batch = await service.find_batch(exchange.path.removeprefix(PREFIX), owner_of(exchange))
    await reply(exchange, service.shown(batch))


async def cancel_batch(services: Services, exchange: Exchange) -> None:
    service = batch_service(services)
    batch_id = exchange.path.removeprefix(PREFIX).removesuffix(CANCEL)
    batch = await service.cancel_batch(batch_id, owner_of(exchange))
    await reply(exchange, service.shown(batch))
