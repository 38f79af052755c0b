"""What the router says about itself: /metrics for Prometheus, /replicas as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from headrace.balance.choice import REASONS
from headrace.server.route.fleet import Fleet
from headrace.server.route.health import STATES

Samples = list[tuple[dict[str, str], float]]

DESIRED_REPLICAS = "headrace:desired_replicas"
RETRY_REASONS = ("no_connection", "lost", "busy")


def _per_replica(read: Callable[[Fleet, Any], float]) -> Callable[[Fleet], Samples]:
    return lambda fleet: [({"replica": each.name}, read(fleet, each)) for each in fleet.replicas]


def _answers(fleet: Fleet) -> Samples:
    return [
        ({"replica": each.name, "outcome": outcome}, count)
        for each in fleet.replicas
        for outcome, count in each.outcomes.items()
    ]


def _states(fleet: Fleet) -> Samples:
    return [
        ({"replica": each.name, "state": state}, float(fleet.state(each) == state))
        for each in fleet.replicas
        for state in STATES
    ]


SERIES: tuple[tuple[str, Literal["counter", "gauge"], str, Callable[[Fleet], Samples]], ...] = (
    (
        DESIRED_REPLICAS,
        "gauge",
        "Number of replicas that the load needs: waiting and running requests against the target per replica.",
        lambda fleet: [({}, fleet.desired.value)],
    ),
    (
        "headrace:route_requests",
        "counter",
        "Requests sent to a replica, by outcome: 2xx, 4xx or 5xx, lost (no answer), broken (in the middle of it).",
        _answers,
    ),
    (
        "headrace:route_retries",
        "counter",
        "Requests sent to another replica: no connection, lost before the first byte, or refused with 503.",
        lambda fleet: [({"reason": reason}, fleet.num_retries[reason]) for reason in RETRY_REASONS],
    ),
    (
        "headrace:route_choices",
        "counter",
        "First choices by reason: prefix, load, spill (the prefix's replica had too much load), turn (round robin).",
        lambda fleet: [({"reason": reason}, fleet.choices[reason]) for reason in REASONS],
    ),
    (
        "headrace:route_prefix_chunks",
        "counter",
        "Chunks of 256 bytes in prompts.",
        lambda fleet: [({}, fleet.num_chunks)],
    ),
    (
        "headrace:route_matched_chunks",
        "counter",
        "Of these, chunks at the start of a prompt that its replica had got before: the affinity hit share.",
        lambda fleet: [({}, fleet.num_matched)],
    ),
    (
        "headrace:route_in_flight",
        "gauge",
        "Requests of this router at a replica.",
        _per_replica(lambda fleet, each: each.num_in_flight),
    ),
    (
        "headrace:route_load",
        "gauge",
        "Requests at a replica, those of others included.",
        _per_replica(lambda fleet, each: each.load),
    ),
    (
        "headrace:route_score",
        "gauge",
        "Health of a replica from errors, latency and queue, 0 to 1.",
        _per_replica(lambda fleet, each: fleet.score(each)),
    ),
    ("headrace:route_state", "gauge", "1 for the state of a replica: up, out or probing.", _states),
)


class RouteMetrics(Collector):
    """Reads the fleet at a scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        for name, kind, help, read in SERIES:
            metric = Metric(name, help, kind)
            for labels, value in read(self._fleet):
                metric.add_sample(f"{name}{'_total' if kind == 'counter' else ''}", labels, value)
            yield metric


def replicas_document(fleet: Fleet) -> dict[str, Any]:
    """The body of /replicas."""
    return {
        "desired_replicas": fleet.desired.value,
        "target_requests": fleet.target,
        "hit_share": fleet.num_matched / fleet.num_chunks if fleet.num_chunks else None,
        "replicas": [
            {
                "name": each.name,
                "url": each.address,
                "state": fleet.state(each),
                "reason": each.health.reason or None,
                "score": round(fleet.score(each), 3),
                "in_flight": each.num_in_flight,
                "load": each.load,
                "waiting": each.scraped.num_waiting,
                "running": each.scraped.num_running,
                "first_byte_s": each.health.first_byte_s,
                "outcomes": dict(each.outcomes),
            }
            for each in fleet.replicas
        ],
    }
