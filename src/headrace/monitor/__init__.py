"""Metrics of a server for Prometheus.

    table.py           every metric, declared once, with its vLLM aliases; docs/metrics.md is generated from it
    series.py          the types `Series` and `Alias`
    metrics.py         `ServerMetrics`: per-request counters and latencies, and the scrape page
    engine_counts.py   counters of the engine, monotonic across engine restarts
    gpu_gauges.py      figures of GPUs, taken in at a scrape
    batcher_metrics.py the page of a DynamicBatcher
    times.py           timestamps of one request, taken from its events
    store.py           the values of an engine, or of the server
    stores.py          those of all engines and the server, exported under each name from the same storage
    alerts.py          every alert, declared once; docs/monitoring.md is generated from it
    conditions.py      the types of an alert's condition
    promql.py          alerts as Prometheus rules
    grafana.py         a dashboard for Grafana
    history.py         an hour of samples in memory
    evaluation.py      alerts evaluated from the history
    wording.py         conditions and values in words
    page.py            the tables of the docs

What happens once per token or step is counted inside the engine (`EngineStats`) and read at a scrape. What happens
once per request is counted here. A metrics page of a batch job is in `headrace.jobs.status`.
"""

from __future__ import annotations

from headrace.monitor.metrics import ServerMetrics
from headrace.monitor.times import RequestMeter, RequestTimes

__all__ = ["RequestMeter", "RequestTimes", "ServerMetrics"]
