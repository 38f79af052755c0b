"""A replica's score, and when it gets requests."""

from __future__ import annotations

from headrace.server.route.health import DRAIN_BELOW, MAX_BACKOFF_S, STEADY_S, Health, score_of


def test_a_score_falls_with_errors_latency_and_queue() -> None:
    assert score_of(0.0, 0.0, 0.0) == score_of(0.0, 1.0, 1.0) == score_of(0.0, 3.0, 4.0) == 1.0
    assert score_of(0.1, 1.0, 1.0) > score_of(0.2, 1.0, 1.0) > score_of(0.2, 6.0, 1.0) > score_of(0.2, 6.0, 8.0)


def test_errors_or_a_queue_take_out_and_latency_helps_them() -> None:
    assert score_of(0.45, 1.0, 1.0) > DRAIN_BELOW > score_of(0.46, 1.0, 1.0)
    assert score_of(0.0, 1.0, 13.0) > DRAIN_BELOW > score_of(0.0, 1.0, 14.0)
    assert score_of(0.0, 6.0, 6.0) > DRAIN_BELOW > score_of(0.0, 6.0, 7.0)
    assert score_of(0.0, 1_000.0, 1.0) > DRAIN_BELOW, "long prompts are slow too"


def test_errors_are_forgotten() -> None:
    health = Health()
    for _ in range(10):
        health.failed(0.0, "")
    shares = [health.error_share(now) for now in (0.0, 10.0, 20.0, 100.0)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.8 and shares[-1] < 0.01


def test_one_error_among_many_answers_is_little() -> None:
    health = Health()
    health.failed(0.0, "")
    assert health.error_share(0.0) == 1 / 3
    for _ in range(97):
        health.answered(0.0)
    assert health.error_share(0.0) == 0.01


def test_the_wait_doubles_until_an_answer() -> None:
    health, now, waits = Health(), 0.0, []
    for _ in range(7):
        health.take_out(now, "lost")
        assert health.state(now) == "out"
        until = next(wait for wait in range(1, 100) if health.state(now + wait) == "probing")
        waits.append(until)
        now += until
    assert waits == [1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S]
    health.answered(now)
    assert health.state(now) == "up" and health.reason == ""


def test_a_replica_that_was_up_for_long_begins_with_the_shortest_wait() -> None:
    health = Health()
    health.take_out(0.0, "")
    health.answered(1.0)
    health.take_out(2.0, "")
    assert health.state(2.0 + 1.5) == "out", "it was up for a second: the wait is two"
    health.answered(4.0)
    health.take_out(4.0 + STEADY_S, "")
    assert health.state(4.0 + STEADY_S + 1.0) == "probing"


def test_an_answer_to_an_older_request_does_not_bring_it_back() -> None:
    health = Health()
    health.take_out(0.0, "")
    health.answered(0.5)
    assert health.state(0.5) == "out"


def test_a_probe_that_fails_takes_it_out_again() -> None:
    health = Health()
    health.take_out(0.0, "")
    health.failed(1.0, "lost again")
    assert (health.state(1.0), health.reason) == ("out", "lost again")
    assert (health.state(2.9), health.state(3.0)) == ("out", "probing")


def test_readiness_has_no_wait() -> None:
    health = Health()
    health.set_ready(False, "draining")
    assert (health.state(0.0), health.reason) == ("out", "draining")
    health.set_ready(True)
    assert health.state(0.0) == "up"


def test_the_latency_is_the_median_of_the_last_streams() -> None:
    health = Health()
    for seconds in (1.0, 2.0, 90.0, 3.0):
        health.answered(0.0, seconds)
    assert health.first_byte_s is None, "too few"
    health.answered(0.0, 4.0)
    health.answered(0.0)
    assert health.first_byte_s == 3.0
    for _ in range(16):
        health.answered(0.0, 7.0)
    assert health.first_byte_s == 7.0
