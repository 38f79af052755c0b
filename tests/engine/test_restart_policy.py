from __future__ import annotations

from random import Random

from headrace.engine.restart_policy import JOB_RESTARTS, SUPERVISOR_RESTARTS, RestartCounter, RestartPolicy


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_up_to_the_maximum() -> None:
    policy = RestartPolicy(max_starts=9, first_delay_s=1.0, max_delay_s=10.0)
    assert [policy.delay_s(number) for number in range(1, 7)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_jitter_shortens_delays_by_up_to_its_share() -> None:
    policy = RestartPolicy(max_starts=9, first_delay_s=1.0, max_delay_s=10.0, jitter=0.5)
    delays = [policy.delay_s(number, Random(number)) for number in range(1, 9)]
    assert all(0.5 * min(10, 2**k) <= delay <= min(10, 2**k) for k, delay in enumerate(delays))
    assert len(set(delays)) == len(delays)


def test_starts_end_at_the_limit() -> None:
    counter = RestartCounter(RestartPolicy(max_starts=4, first_delay_s=1.0), Clock())
    assert [counter.next_delay_s() for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, None, None]


def test_starts_outside_the_window_do_not_count() -> None:
    clock = Clock()
    counter = RestartCounter(RestartPolicy(max_starts=2, window_s=600.0, first_delay_s=1.0), clock)
    assert [counter.next_delay_s(), counter.next_delay_s()] == [1.0, 2.0]
    clock.now += 599.0
    assert counter.next_delay_s() is None
    clock.now += 1.0
    assert counter.next_delay_s() == 1.0


def test_without_a_window_every_start_counts() -> None:
    clock = Clock()
    counter = RestartCounter(RestartPolicy(max_starts=1, first_delay_s=1.0), clock)
    counter.next_delay_s()
    clock.now += 1e9
    assert counter.next_delay_s() is None


def test_the_numbers_are_those_of_the_documentation() -> None:
    """docs/serving-operations.md and docs/batch-jobs.md."""
    assert RestartPolicy(max_starts=5, window_s=600.0, first_delay_s=1.0) == SUPERVISOR_RESTARTS
    assert RestartPolicy(max_starts=3, first_delay_s=0.5, max_delay_s=30.0, jitter=0.5) == JOB_RESTARTS
