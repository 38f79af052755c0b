"""GET /: the dashboard page. GET /dashboard/data: its figures, and the samples of the last hour that it does not have.

The page asks every two seconds. What changes seldom has routes of its own: /alerts, /bottleneck, /server_info,
/v1/batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import time
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np

from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor.history import SPAN_S
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.page import dashboard_page
from headrace.server.self_monitor import COLUMNS
from headrace.server.services import SelfMonitor, Services
from headrace.version import __version__

NUM_DIGITS = 4  # of a figure
MAX_SINCE_DIGITS = 15


async def page(services: Services, exchange: Exchange) -> None:
    found = dashboard_page()
    await exchange.reply(200, found.body, content_type="text/html; charset=utf-8", headers=found.headers)


async def data(services: Services, exchange: Exchange) -> None:
    monitor = services.self_monitor
    if monitor is None:
        raise ApiError(503, "this server does not watch itself", type="server_error", code="no_monitor")
    body = figures(services, monitor, since=_since(exchange))
    await exchange.reply(200, msgspec.json.encode(body), headers={"Cache-Control": "no-store"})


def figures(services: Services, monitor: SelfMonitor, *, since: int) -> dict[str, Any]:
    """The figures of this moment, and the samples after the first `since`."""
    history = monitor.history
    columns = history.table(COLUMNS, after=since)
    return {
        "server": services.instance_id,
        "version": __version__,
        "model": services.model_name,
        "started_at": services.started_at,
        "time": round(time(), 1),
        "state": services.state.refuse_reason() or "ready",
        "live": _rounded(monitor.now()),
        "gpu": _gpu(services.gpus),
        "has_batches": services.batches is not None,
        "history": {
            "next": history.num_recorded,
            "span_s": SPAN_S,
            "columns": {name: _short(values) for name, values in columns.items()},
        },
    }


def _since(exchange: Exchange) -> int:
    """The number of samples since the start that the page has."""
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    text = query.get("since", ["0"])[-1]
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_SINCE_DIGITS):
        raise ApiError(400, "since must be the number `history.next` of an earlier answer", param="since")
    return int(text)


def _gpu(monitor: GpuMonitor | None) -> dict[str, Any]:
    if monitor is None:
        return {"source": "none", "missing": "this server does not watch GPUs", "gpus": []}
    found = monitor.now()
    gpus = [
        {
            "index": gpu.index,
            "name": gpu.name,
            "utilization": gpu.utilization,
            "memory_bytes": gpu.memory_bytes,
            "memory_total_bytes": gpu.memory_total_bytes,
            "power_w": gpu.power_w,
            "temperature_c": gpu.temperature_c,
            "sm_clock_mhz": gpu.sm_clock_mhz,
        }
        for gpu in found.gpus
    ]
    return {"source": found.source, "missing": found.missing, "gpus": gpus}


def _rounded(figures: dict[str, float | None]) -> dict[str, float | None]:
    return dict(zip(figures, _short(figures.values()), strict=True))


def _short(values: Iterable[float | None]) -> list[float | None]:
    """Numbers of a few digits, which are short in JSON. Times keep tenths of a second."""
    numbers = np.array([np.nan if value is None else value for value in values])
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitudes = np.nan_to_num(np.floor(np.log10(np.abs(numbers))), neginf=0.0)
    scale = 10.0 ** np.clip(NUM_DIGITS - 1 - magnitudes, 1, 9)
    return [None if value != value else value for value in (np.round(numbers * scale) / scale).tolist()]
