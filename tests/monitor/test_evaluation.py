"""States and messages of alerts inside the server."""

from __future__ import annotations

from headrace.monitor import table
from headrace.monitor.conditions import Source
from headrace.monitor.evaluation import AlertStates
from headrace.monitor.history import History
from tests.monitor.scenarios import BY_NAME, history_of

ALERT = BY_NAME["KvCacheNearlyFull"]
KV = Source(table.KV_USE)


class Watched:
    """An alert on the KV cache use, sampled once a minute."""

    def __init__(self) -> None:
        self.history: History = history_of(ALERT.condition)
        self.states = AlertStates([ALERT], self.history)
        self.minute = 0

    def see(self, *values: float | None) -> list[str]:
        """Record one value a minute, and return what is said about them."""
        said = []
        for value in values:
            now = 60.0 * self.minute
            self.history.record({KV: value}, now=now, wall_time=1e9 + now)
            said += [str(change) for change in self.states.evaluate(now=now, wall_time=1e9 + now)]
            self.minute += 1
        return said

    @property
    def state(self) -> str:
        return self.states.statuses[0].state


def test_a_firing_alert_is_reported_once_when_it_starts_and_once_when_it_ends() -> None:
    watched = Watched()
    assert watched.see(0.5, 0.95, 0.95, 0.95, 0.95, 0.95) == []
    (said,) = watched.see(0.95)
    assert said.startswith("alert firing: KvCacheNearlyFull (info); KV cache use: 95 %, threshold: 90 %. ")
    assert ALERT.advice in said
    assert watched.see(*[0.97] * 20) == []
    (said,) = watched.see(0.4)
    assert said == "alert resolved: KvCacheNearlyFull after 1,260 s; KV cache use: 40 %"
    assert watched.see(0.4, 0.95, 0.4) == []


def test_times_are_those_of_the_state_and_of_the_condition() -> None:
    watched = Watched()
    watched.see(0.5, 0.5, *[0.95] * 8)
    (status,) = watched.states.statuses
    assert (status.state, status.active_since, status.since) == ("firing", 1e9 + 120, 1e9 + 420)


def test_a_value_that_disappears_is_unknown_and_ends_the_alert() -> None:
    watched = Watched()
    watched.see(*[0.95] * 6)
    assert watched.state == "firing"
    (said,) = watched.see(None)
    assert said == "alert resolved: KvCacheNearlyFull after 60 s; KV cache use: no value"
    assert watched.state == "unknown"
    assert watched.states.statuses[0].judgement.note == "headrace:kv_cache_usage has no value now"


def test_a_baseline_says_how_many_requests_it_lacks() -> None:
    alert = BY_NAME["EndToEndLatencyHigh"]
    history = history_of(alert.condition)
    states = AlertStates([alert], history)
    num_buckets = len(table.END_TO_END_SECONDS.bounds or ()) + 1
    for step in range(100):
        counts = [step] + [0] * (num_buckets - 1)
        history.record(dict.fromkeys(history.sources, counts), now=10.0 * step, wall_time=0.0)
    states.evaluate(now=990.0, wall_time=0.0)
    judgement = states.statuses[0].judgement
    assert judgement.threshold is None
    assert judgement.note == "the baseline needs 200 requests in the hour up to 5 min ago, and had 69"
