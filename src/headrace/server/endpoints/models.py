"""GET /v1/models: the model that this server serves."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from headrace.server.endpoints.generation import check_model
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

PREFIX = "/v1/models/"


async def list_models(services: Services, exchange: Exchange) -> None:
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": [_model(services)]}))


async def show_model(services: Services, exchange: Exchange) -> None:
    name = exchange.path.removeprefix(PREFIX)
    check_model(services, name if name == services.model_name else unquote(name))
    await exchange.reply(200, msgspec.json.encode(_model(services)))


def _model(services: Services) -> dict[str, Any]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "headrace",
        "root": services.model_name,
        "parent": None,
        "max_model_len": services.engine.settings.max_model_len,
    }
