"""The client's own cost is flagged beyond its limits only."""

from __future__ import annotations

from headrace.bench.load.cost import ClientCost


def test_a_client_at_ease_has_no_flags() -> None:
    cost = ClientCost.of([0.3, 0.5], [0.001] * 100, [0.0005] * 100)
    assert cost.flags == []
    assert cost.loop_lag_ms == {"p50": 1.0, "p99": 1.0, "max": 1.0}


def test_a_busy_process_is_flagged() -> None:
    [flag] = ClientCost.of([0.2, 0.97], [], None).flags
    assert "97% busy" in flag and "measure the client" in flag


def test_a_late_event_loop_is_flagged() -> None:
    [flag] = ClientCost.of([0.2], [0.001] * 50 + [0.05] * 50, None).flags
    assert "50 ms late" in flag


def test_late_sends_are_flagged() -> None:
    [flag] = ClientCost.of([0.2], [], [0.0] * 50 + [0.2] * 50).flags
    assert "200 ms after they were due" in flag


def test_a_closed_loop_has_no_lateness() -> None:
    cost = ClientCost.of([0.1], [0.0], None)
    assert cost.send_late_ms is None
    assert cost.as_json()["cpu_shares"] == [0.1]
