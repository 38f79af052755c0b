"""ORCA's load report in the headers of an answer, for proxies that balance by load (Envoy, GKE's gateway).

A client asks for it with `endpoint-load-metrics-format: TEXT` or `JSON`; the names of the figures are vLLM's.
"""

from __future__ import annotations

import json

from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

ASKED = b"endpoint-load-metrics-format"
REPORTED = "endpoint-load-metrics"


def load_headers(services: Services, exchange: Exchange) -> dict[str, str]:
    """The header with the load of this moment; none if it was not asked for in a known format."""
    form = (exchange.header(ASKED) or b"").strip().upper()
    if form not in (b"TEXT", b"JSON"):
        return {}
    found = _figures(services)
    if form == b"JSON":
        return {REPORTED: f"JSON {json.dumps({'named_metrics': found})}"}
    return {REPORTED: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in found.items())}


def _figures(services: Services) -> dict[str, float]:
    """Of several engines the fullest cache counts, and all requests that wait."""
    each = [state.stats.scheduler for state in services.engine.states if state.stats is not None]
    return {
        "kv_cache_usage_perc": float(max((one.kv_use for one in each), default=0.0)),
        "num_requests_waiting": float(sum(one.num_waiting for one in each)),
    }
