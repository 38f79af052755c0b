"""GET /alerts: active alerts in the format of Prometheus' /api/v1/alerts, and the state of every alert."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.monitor.evaluation import AlertStatus
from headrace.monitor.wording import shown, summary_words, threshold_words
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services


async def show(services: Services, exchange: Exchange) -> None:
    monitor = services.self_monitor
    if monitor is None:
        raise ApiError(503, "this server does not watch itself", type="server_error", code="no_monitor")
    statuses = monitor.alerts.statuses
    active = [_as_prometheus(services, status) for status in statuses if status.state in ("pending", "firing")]
    body = {
        "status": "success",
        "data": {"alerts": active},
        "states": [_as_state(status) for status in statuses],
        "history": {"num_samples": len(monitor.history), "seconds": monitor.history.seconds},
    }
    await exchange.reply(200, msgspec.json.encode(body))


def _as_prometheus(services: Services, status: AlertStatus) -> dict[str, Any]:
    alert, value = status.alert, status.judgement.value
    summary = summary_words(alert, "no value" if value is None else shown(value, alert.unit))
    return {
        "labels": {"alertname": f"Headrace{alert.name}", "severity": alert.severity, "model_name": services.model_name},
        "annotations": {"summary": summary, "description": alert.meaning, "advice": alert.advice},
        "state": status.state,
        "activeAt": _shown_time(status.active_since),
        "value": "NaN" if value is None else f"{value:.6e}",
    }


def _as_state(status: AlertStatus) -> dict[str, Any]:
    alert, judgement = status.alert, status.judgement
    return {
        "name": alert.name,
        "severity": alert.severity,
        "state": status.state,
        "since": _shown_time(status.since),
        "measure": alert.measure,
        "unit": alert.unit,
        "value": judgement.value,
        "operator": alert.condition.operator,
        "threshold": judgement.threshold,
        "threshold_text": threshold_words(alert),
        "for_seconds": alert.for_s,
        "note": judgement.note,
        "meaning": alert.meaning,
        "advice": alert.advice,
    }


def _shown_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
