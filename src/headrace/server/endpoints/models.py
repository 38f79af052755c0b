"""GET /v1/models: the model that this server serves, and its LoRA adapters."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import msgspec

from headrace.server.endpoints.generation import check_model
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

PREFIX = "/v1/models/"


async def list_models(services: Services, exchange: Exchange) -> None:
    models = [_model(services, name) for name in (*services.model_names, *services.engine.adapters)]
    await exchange.reply(200, msgspec.json.encode({"object": "list", "data": models}))


async def show_model(services: Services, exchange: Exchange) -> None:
    name = exchange.path.removeprefix(PREFIX)
    name = name if name in services.model_names or services.adapter_of(name) is not None else unquote(name)
    check_model(services, name)
    await exchange.reply(200, msgspec.json.encode(_model(services, name)))


def _model(services: Services, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "headrace",
        "root": services.engine.adapters.get(name, services.model_name),
        "parent": services.model_name if services.adapter_of(name) is not None else None,
        "max_model_len": services.engine.settings.max_model_len,
    }
