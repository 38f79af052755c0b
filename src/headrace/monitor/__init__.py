"""What a running system says of itself: metrics, and later alerts and a live view."""

from __future__ import annotations

from headrace.monitor.metrics import ServerMetrics
from headrace.monitor.times import RequestMeter, RequestTimes

__all__ = ["RequestMeter", "RequestTimes", "ServerMetrics"]
