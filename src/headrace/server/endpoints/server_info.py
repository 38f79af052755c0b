"""GET /server_info: every setting in use with its source and reason, the model's size, and how long the stages of the
start took, for benchmarks and reports.

vLLM has the same path, with its own fields, in its development mode.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

import msgspec

from headrace.engine.group import EngineState
from headrace.engine.in_force import settings_in_force, shape_of
from headrace.engine.settings import SettingInForce
from headrace.server.http.exchange import Exchange
from headrace.server.options import ServerOptions
from headrace.server.request_queue import REASONS, QueueLimits
from headrace.server.services import Services
from headrace.startup import stage_seconds
from headrace.version import __version__

# Shown as set or not set: keys, and names of files.
KEYS = ("api_key", "admin_key", "api_key_file", "ssl_certfile", "ssl_keyfile")
_HIDDEN = (*KEYS, "tokenizer")


async def show(services: Services, exchange: Exchange) -> None:
    body = {
        "version": __version__,
        "model": {"name": services.model_name, **shape_of(services.engine.spec)},
        "settings": shown_settings(services, hidden=_HIDDEN),
        "warnings": services.engine.settings.warnings,
        "engines": [_engine(state) for state in services.engine.states],
        "start": {
            "seconds": round(services.engine.start_seconds, 3),
            "stages": stage_seconds(services.engine.start_stages),
        },
    }
    await exchange.reply(200, msgspec.json.encode(body))


def _engine(state: EngineState) -> dict[str, Any]:
    """One engine: whether it runs, and its part of the machine."""
    settings = state.settings
    return {
        "phase": state.phase,
        "num_restarts": state.num_restarts,
        "device": next((choice.reason for choice in settings.choices if choice.name == "device"), settings.device),
        "num_threads": settings.num_threads,
        "max_num_seqs": settings.max_num_seqs,
        "num_blocks": settings.num_blocks,
    }


def shown_settings(services: Services, *, hidden: Collection[str]) -> dict[str, dict[str, Any]]:
    """Every setting of engine and server. Those of `hidden` are shown as set or not set."""
    found = settings_in_force(services.engine.settings, services.config)
    found["model"] = SettingInForce(services.model_name, found["model"].source)  # not its directory
    found |= _of_server(services)
    return {
        name: asdict(setting) | ({"value": "set"} if name in hidden and setting.value is not None else {})
        for name, setting in found.items()
    }


def _of_server(services: Services) -> dict[str, SettingInForce]:
    options = services.options
    found = {}
    for field in fields(ServerOptions):
        value = getattr(options, field.name)
        found[field.name] = SettingInForce(value, "default" if value == field.default else "given")
    limits = QueueLimits.of(options, services.engine.total_settings)
    for name, limit in (("max_num_queued_reqs", limits.max_requests), ("max_num_queued_tokens", limits.max_tokens)):
        if getattr(options, name) is None:
            found[name] = SettingInForce(limit, "automatic", REASONS[name])
    return found
