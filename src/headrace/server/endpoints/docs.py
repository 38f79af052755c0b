"""GET /docs: the OpenAPI document as a page. It asks for /openapi.json itself, with the key that the user types."""

from __future__ import annotations

from headrace.server.http.exchange import Exchange
from headrace.server.page import docs_page
from headrace.server.services import Services


async def page(services: Services, exchange: Exchange) -> None:
    found = docs_page()
    await exchange.reply(200, found.body, content_type="text/html; charset=utf-8", headers=found.headers)
