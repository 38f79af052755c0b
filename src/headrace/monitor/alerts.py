"""The alerts that come with Headrace, as data.

Prometheus rules (`headrace alerts`), the server's own evaluation (`GET /alerts` and its log) and the table of
docs/monitoring.md are derived from this list: `python -m headrace.monitor.page alerts` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headrace.errors import ConfigError, nearest
from headrace.monitor import table
from headrace.monitor.conditions import (
    Baseline,
    Condition,
    Increase,
    Level,
    Missing,
    Multiple,
    Quantile,
    Rate,
    Share,
    Source,
)
from headrace.monitor.series import Series

Severity = Literal["info", "warning", "critical"]
Unit = Literal["share", "seconds", "per_second", "count", "state"]

MINUTE = 60
OVERLOAD_REASONS = ("queue_full", "queue_tokens", "queue_timeout", "bodies")  # refusals because of too much load


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that must hold for `for_s` seconds before the alert fires."""

    name: str  # without the prefix that tells whose alert it is
    severity: Severity
    measure: str  # what the value is
    unit: Unit
    condition: Condition
    for_s: int
    meaning: str
    advice: str


OVERLOAD = Source(table.REFUSED, (("reason", OVERLOAD_REASONS),))
FAILED = Source(table.FINISHED, (("reason", ("error",)),))
HTTP_ERRORS = Source(table.HTTP_ERRORS)
HTTP_RESPONSES = Source(table.ANSWERED, (("handler", table.GENERATING_HANDLERS),))


def _p95(series: Series) -> Quantile:
    return Quantile(Source(series), 0.95, 5 * MINUTE)


def _over_twice_its_baseline(series: Series) -> Condition:
    value = _p95(series)
    return Condition(value, ">", Multiple(2.0, Baseline(value, requests=Source(table.END_TO_END_SECONDS))))


ALERTS: tuple[Alert, ...] = (
    Alert(
        name="EngineDown",
        severity="critical",
        measure="the engine is down",
        unit="state",
        condition=Condition(Level(Source(table.ENGINE_UP)), "<", 1.0),
        for_s=MINUTE,
        meaning="The engine does not respond. Requests are refused with 503 until it is back.",
        advice="Read the server's log for the cause of death. The server restarts the engine by itself up to "
        "--max-engine-restarts times in ten minutes; if it gives up, the process ends and must be started again.",
    ),
    Alert(
        name="MetricsMissing",
        severity="critical",
        measure="metrics are missing",
        unit="state",
        condition=Condition(Missing(Source(table.RUNNING)), ">", 0.0),
        for_s=5 * MINUTE,
        meaning="No server exports the number of running requests: it is down, its engine is down, or it is not "
        "scraped.",
        advice="Call /health and /metrics by hand. If they answer, check the scrape configuration: address, key and "
        "TLS.",
    ),
    Alert(
        name="EngineRestarted",
        severity="warning",
        measure="engine restarts in 10 min",
        unit="count",
        condition=Condition(Increase(Source(table.RESTARTS), 10 * MINUTE), ">", 0.0),
        for_s=0,
        meaning="The engine died or hung and was restarted. Requests that were running failed.",
        advice="Read the log before the restart. Out of memory: lower --gpu-memory-utilization or --max-num-seqs. A "
        "step over --step-timeout-s: look for a hung device.",
    ),
    Alert(
        name="NoProgress",
        severity="critical",
        measure="generated tokens per second",
        unit="per_second",
        condition=Condition(
            Rate(Source(table.GENERATED_TOKENS), MINUTE),
            "==",
            0.0,
            also=(Condition(Level(Source(table.RUNNING)), ">", 0.0),),
        ),
        for_s=MINUTE,
        meaning="Requests run, but no token is generated.",
        advice="A prompt whose prefill takes minutes looks the same: check whether the number of steps grows "
        "(headrace:steps_total). If it does not, the device hangs; Headrace restarts the engine after "
        "--step-timeout-s.",
    ),
    Alert(
        name="KvCacheNearlyFull",
        severity="info",
        measure="KV cache use",
        unit="share",
        condition=Condition(Level(Source(table.KV_USE)), ">", 0.9),
        for_s=5 * MINUTE,
        meaning="The KV cache is nearly full. This is normal under full load, and harmful together with preemptions or "
        "a growing queue.",
        advice="If PreemptionsFrequent fires too: lower --max-num-seqs, shorten --max-model-len, use "
        "--kv-cache-dtype fp8, or add memory or servers.",
    ),
    Alert(
        name="PreemptionsFrequent",
        severity="warning",
        measure="preemptions per second",
        unit="per_second",
        condition=Condition(Rate(Source(table.PREEMPTIONS), 5 * MINUTE), ">", 1.0),
        for_s=5 * MINUTE,
        meaning="The KV cache is too small for the running requests: sequences give up their slots and are computed "
        "again.",
        advice="Lower --max-num-seqs, use --kv-cache-dtype fp8, raise --gpu-memory-utilization (up to 0.95), or add "
        "servers.",
    ),
    Alert(
        name="RequestsWaiting",
        severity="warning",
        measure="waiting requests",
        unit="count",
        condition=Condition(Level(Source(table.WAITING)), ">", 100.0),
        for_s=5 * MINUTE,
        meaning="Many sequences wait for a slot or for KV cache blocks.",
        advice="While KV cache use is low, --max-num-seqs is the limit: raise it. While it is high, memory is the "
        "limit: add servers, or send less.",
    ),
    Alert(
        name="QueueNearlyFull",
        severity="warning",
        measure="queue use",
        unit="share",
        condition=Condition(Level(Source(table.QUEUE_USE)), ">", 0.8),
        for_s=5 * MINUTE,
        meaning="Most places in the queue are taken; when it is full, requests are refused. Unknown if the queue has "
        "no limit.",
        advice="Add servers or send less. A longer queue (--max-num-queued-reqs) turns refusals into waiting time.",
    ),
    Alert(
        name="OldestRequestWaiting",
        severity="warning",
        measure="wait of the oldest request",
        unit="seconds",
        condition=Condition(Level(Source(table.OLDEST_WAIT)), ">", 30.0),
        for_s=MINUTE,
        meaning="The oldest request without a first token has waited for long.",
        advice="Compare request_queue_time_seconds with request_prefill_time_seconds. Queue: see RequestsWaiting. "
        "Prefill: the prompt is long, or --max-num-batched-tokens is small.",
    ),
    Alert(
        name="RequestsRefused",
        severity="warning",
        measure="refused requests per second",
        unit="per_second",
        condition=Condition(Rate(OVERLOAD, 5 * MINUTE), ">", 0.0),
        for_s=5 * MINUTE,
        meaning="Requests are refused with 429 or 503 because of too much load. They are not counted as errors.",
        advice="Clients should honour Retry-After. Add servers, send less, or allow a longer queue "
        "(--max-num-queued-reqs, --max-num-queued-tokens).",
    ),
    Alert(
        name="RequestsFailing",
        severity="critical",
        measure="share of requests that failed",
        unit="share",
        condition=Condition(
            Share(Rate(FAILED, 5 * MINUTE), Rate(Source(table.FINISHED), 5 * MINUTE)),
            ">",
            0.01,
        ),
        for_s=5 * MINUTE,
        meaning="Requests end with finish reason `error`, streams that broke included.",
        advice="The server's log has the cause. Check EngineRestarted: a dying engine fails what was running.",
    ),
    Alert(
        name="HttpErrors",
        severity="critical",
        measure="share of responses with a server error",
        unit="share",
        condition=Condition(Share(Rate(HTTP_ERRORS, 5 * MINUTE), Rate(HTTP_RESPONSES, 5 * MINUTE)), ">", 0.01),
        for_s=5 * MINUTE,
        meaning="Responses have a status of 500 or more, refusals (503) excepted.",
        advice="500: the server's log has the traceback. 504: requests exceed --request-timeout-s.",
    ),
    Alert(
        name="TimeToFirstTokenHigh",
        severity="warning",
        measure="p95 time to first token",
        unit="seconds",
        condition=_over_twice_its_baseline(table.FIRST_TOKEN_SECONDS),
        for_s=5 * MINUTE,
        meaning="The p95 time to the first token is far above its usual value, the median of the last hour.",
        advice="Look at the queue first (RequestsWaiting, request_queue_time_seconds), then at longer prompts "
        "(request_prompt_tokens) and at the prefix cache's hits.",
    ),
    Alert(
        name="InterTokenLatencyHigh",
        severity="warning",
        measure="p95 inter-token latency",
        unit="seconds",
        condition=_over_twice_its_baseline(table.TOKEN_GAP_SECONDS),
        for_s=5 * MINUTE,
        meaning="The p95 time between two tokens is far above its usual value, the median of the last hour.",
        advice="More sequences per step, or prefill chunks between decode steps: lower --max-num-seqs or "
        "--max-num-batched-tokens. Check PreemptionsFrequent, and other programs on the device.",
    ),
    Alert(
        name="EndToEndLatencyHigh",
        severity="warning",
        measure="p95 end-to-end latency",
        unit="seconds",
        condition=_over_twice_its_baseline(table.END_TO_END_SECONDS),
        for_s=5 * MINUTE,
        meaning="The p95 time of a request is far above its usual value, the median of the last hour.",
        advice="If neither of the two latencies above grew, answers became longer (request_generation_tokens).",
    ),
    Alert(
        name="EventLoopLagging",
        severity="warning",
        measure="p95 event loop lag",
        unit="seconds",
        condition=Condition(_p95(table.LOOP_LAG), ">", 0.1),
        for_s=5 * MINUTE,
        meaning="The HTTP process cannot keep up: its event loop runs timers late, and streams stutter.",
        advice="Check the CPU use of the server process and of others on the machine. Fewer, larger streams and fewer "
        "logprobs cost less.",
    ),
)


def with_thresholds(alerts: Iterable[Alert], thresholds: Mapping[str, float]) -> tuple[Alert, ...]:
    """The alerts with other thresholds, by name. A multiple of a baseline keeps its baseline."""
    alerts = tuple(alerts)
    names = [alert.name for alert in alerts]
    for name in thresholds:
        if name not in names:
            raise ConfigError(f"no alert is called {name!r}{nearest(name, names)} (alerts: {', '.join(names)})")
    return tuple(
        replace(alert, condition=_with_threshold(alert.condition, thresholds[alert.name]))
        if alert.name in thresholds
        else alert
        for alert in alerts
    )


def _with_threshold(condition: Condition, threshold: float) -> Condition:
    if isinstance(condition.threshold, Multiple):
        return replace(condition, threshold=replace(condition.threshold, factor=threshold))
    return replace(condition, threshold=threshold)
