from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.engine.fake_settings import fake_settings
from headrace.engine.settings import Settings
from headrace.errors import RequestError
from headrace.server.options import ServerOptions
from headrace.server.request_queue import (
    MAX_RETRY_S,
    MIN_QUEUED_REQS,
    MIN_QUEUED_TOKENS,
    WINDOW_S,
    Overloaded,
    QueueLimits,
    RequestQueue,
)
from headrace.server.state import ServerState
from tests.hand_timer import HandTimer


@pytest.fixture
def settings() -> Settings:
    return fake_settings(load_format="auto", num_blocks=100)


def queue(
    max_requests: int = 4,
    max_tokens: int = 1000,
    max_num_seqs: int = 1,
    state: ServerState | None = None,
    clock: HandTimer | None = None,
    **options: object,
) -> RequestQueue:
    return RequestQueue(
        ServerOptions(**options),  # type: ignore[arg-type]
        QueueLimits(max_requests, max_tokens, max_num_seqs),
        clock or HandTimer(),
        state,
    )


def refusal(made: RequestQueue, num_requests: int = 1, num_tokens: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        made.reserve(num_requests, num_tokens=num_tokens)
    return refused.value


def counts(made: RequestQueue) -> tuple[int, int, int]:
    return made.num_waiting, made.num_waiting_tokens, made.num_running


# ---- places


def test_a_place_is_waiting_then_running_then_free() -> None:
    made = queue()
    reservation = made.reserve(2, num_tokens=100)
    assert counts(made) == (2, 100, 0)
    reservation.count_tokens(70)
    assert counts(made) == (2, 70, 0)
    reservation.started()
    assert counts(made) == (0, 0, 2)
    reservation.release()
    assert counts(made) == (0, 0, 0)


def test_the_oldest_wait_is_that_of_the_oldest_waiting_request() -> None:
    clock = HandTimer()
    made = queue(clock=clock)
    assert made.oldest_wait_s == 0.0
    first = made.reserve()
    clock.move(5.0)
    second = made.reserve()
    clock.move(2.0)
    assert made.oldest_wait_s == 7.0
    first.started()
    assert made.oldest_wait_s == 2.0
    second.release()
    assert made.oldest_wait_s == 0.0


def test_release_and_started_may_be_called_twice() -> None:
    made = queue()
    with made.reserve(1, num_tokens=10) as reservation:
        reservation.started()
        reservation.started()
        reservation.release()
        reservation.release()
    reservation.started()
    assert counts(made) == (0, 0, 0)


def test_the_with_block_releases_places_after_an_error() -> None:
    made = queue()
    with pytest.raises(ZeroDivisionError), made.reserve(3, num_tokens=25):
        raise ZeroDivisionError
    assert counts(made) == (0, 0, 0)


def test_the_request_over_the_limit_is_refused_and_takes_no_place() -> None:
    made = queue(max_requests=4)
    made.reserve(3)
    assert refusal(made, 2).reason == "queue_full"
    assert made.num_waiting == 3
    made.reserve(1)


def test_running_requests_take_no_place_in_the_queue() -> None:
    made = queue(max_requests=1)
    for _ in range(5):
        made.reserve(1).started()
    assert made.num_running == made.num_in_flight == 5


def test_more_prompts_than_the_queue_can_hold_are_a_request_error() -> None:
    with pytest.raises(RequestError, match="5 prompts at once are more than the 4") as refused:
        queue(max_requests=4).reserve(5)
    assert refused.value.param == "prompt"


# ---- tokens


def test_estimated_tokens_fill_the_queue_until_they_are_counted() -> None:
    made = queue(max_tokens=1000)
    made.reserve(1, num_tokens=600)
    assert refusal(made, num_tokens=401).reason == "queue_tokens"
    made.reserve(1, num_tokens=400)


def test_an_empty_queue_accepts_a_request_of_any_length() -> None:
    made = queue(max_tokens=1000)
    reservation = made.reserve(1, num_tokens=250000)
    reservation.count_tokens(5000)
    assert refusal(made, num_tokens=1).reason == "queue_tokens"


def test_a_request_with_more_tokens_than_estimated_is_refused_and_released() -> None:
    made = queue(max_tokens=1000)
    made.reserve(1, num_tokens=900)
    second = made.reserve(1, num_tokens=10)
    with pytest.raises(Overloaded) as refused:
        second.count_tokens(101)
    assert refused.value.reason == "queue_tokens"
    second.release()
    assert counts(made) == (1, 900, 0)


def test_a_burst_is_refused_before_any_of_it_is_tokenized() -> None:
    """Guards against a known race: the limit is checked before the prompt is rendered, but counted after."""
    made = queue(max_requests=4)
    tokenized: list[int] = []
    refused: list[int] = []

    async def handle(number: int, gate: asyncio.Event) -> None:
        try:
            with made.reserve(1, num_tokens=10) as reservation:
                await gate.wait()  # tokenizing, on another thread
                tokenized.append(number)
                reservation.count_tokens(12)
        except Overloaded:
            refused.append(number)

    async def burst() -> None:
        gate = asyncio.Event()
        tasks = [asyncio.create_task(handle(number, gate)) for number in range(100)]
        await asyncio.sleep(0)
        assert len(refused) == 96 and not tokenized
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(burst())
    assert tokenized == [0, 1, 2, 3]
    assert made.refusals == {"queue_full": 96}
    assert counts(made) == (0, 0, 0)


# ---- Retry-After


def retries(made: RequestQueue, number: int, num_requests: int = 1) -> list[int]:
    return [refusal(made, num_requests).retry_after_s for _ in range(number)]


def test_a_burst_on_an_idle_server_is_told_to_come_back_soon() -> None:
    made = queue(max_requests=8, max_num_seqs=2)
    made.reserve(8)
    assert retries(made, 8) == [1, 1, 1, 1, 2, 2, 3, 3]


def test_a_burst_after_little_traffic_is_told_to_come_back_soon() -> None:
    clock = HandTimer()
    made = queue(max_requests=8, max_num_seqs=2, clock=clock)
    for _ in range(3):
        with made.reserve() as reservation:
            reservation.started()
            clock.move(4.0)
        clock.move(20.0)
    made.reserve(8)
    assert made.drain_rate == 2 / 4
    assert retries(made, 8) == [1, 1, 2, 4, 6, 8, 10, 12]


def test_the_values_are_spread_up_to_the_time_that_the_queue_needs() -> None:
    clock = HandTimer()
    made = queue(max_requests=8, max_num_seqs=2, clock=clock)
    waiting = [made.reserve() for _ in range(8)]
    for reservation in waiting[:2]:
        reservation.started()
    clock.move(10.0)
    for _ in range(2):
        made.reserve()
    assert made.drain_rate == 2 / 10
    assert retries(made, 9) == [5, 10, 15, 20, 25, 30, 35, 40, 5]


def test_a_request_of_several_prompts_waits_for_as_many_places() -> None:
    made = queue(max_requests=8, max_num_seqs=2)
    made.reserve(2).started()
    made.reserve(8)
    assert retries(made, 3, num_requests=6) == [3, 4, 4]


def test_retry_after_for_tokens_counts_the_requests_that_hold_them() -> None:
    made = queue(max_requests=10, max_tokens=1000, max_num_seqs=1)
    made.reserve().started()
    for _ in range(4):
        made.reserve(num_tokens=250)
    assert [refusal(made, num_tokens=tokens).retry_after_s for tokens in (100, 100, 500)] == [1, 2, 4]
    assert refusal(made, num_tokens=1_000_000).retry_after_s == 4


def test_a_queue_that_does_not_drain_asks_for_more_and_more_time_up_to_the_maximum() -> None:
    clock = HandTimer()
    made = queue(max_requests=1, clock=clock)
    made.reserve(1)
    assert refusal(made).retry_after_s == 1
    clock.move(20.0)
    assert refusal(made).retry_after_s == 20
    made = queue(max_requests=3, clock=clock)
    made.reserve(3)
    clock.move(1000.0)
    assert retries(made, 3) == [WINDOW_S, MAX_RETRY_S, MAX_RETRY_S]


def test_a_rate_is_measured_while_requests_wait_over_the_last_window() -> None:
    clock = HandTimer()
    made = queue(max_requests=1000, clock=clock)
    made.reserve()  # waits throughout
    for per_second in (1, 6):
        for _ in range(WINDOW_S):
            for _ in range(per_second):
                made.reserve().started()
            clock.move(1.0)
        assert made.drain_rate == per_second


def test_requests_that_leave_the_queue_unstarted_do_not_count_as_drained() -> None:
    clock = HandTimer()
    made = queue(max_requests=100, clock=clock)
    made.reserve()
    for _ in range(50):
        made.reserve().release()
    clock.move(10.0)
    assert made.drain_rate == 1 / 10


# ---- status, states


@pytest.mark.parametrize("status", [503, 429])
def test_the_status_of_a_full_queue_is_configurable(status: int) -> None:
    made = queue(max_requests=1, overload_status=status)
    made.reserve(1)
    assert refusal(made).status == status


def test_a_server_that_is_not_ready_refuses_requests() -> None:
    phases = ["ready"]
    state = ServerState(lambda: phases[-1])
    made = queue(state=state, overload_status=429, shutdown_timeout_s=12.5)
    assert (refusal(made).reason, refusal(made).status) == ("starting", 503)
    state.ready()
    made.reserve(1)
    phases.append("restarting")
    assert refusal(made).reason == "engine_dead"
    phases.append("ready")
    state.drain()
    assert (refusal(made).reason, refusal(made).retry_after_s) == ("draining", 13)
    assert made.refusals == {"starting": 2, "engine_dead": 1, "draining": 2}


def test_the_default_limits_are_four_times_the_engines_capacity(settings: Settings) -> None:
    large = replace(settings, max_num_seqs=1000, num_blocks=100_000)
    limits = QueueLimits.of(ServerOptions(), large)
    assert (limits.max_requests, limits.max_tokens) == (4 * 1000, 4 * 100_000 * 16)


def test_a_small_engine_has_a_queue_that_load_tests_do_not_fill(settings: Settings) -> None:
    limits = QueueLimits.of(ServerOptions(), settings)
    assert (limits.max_requests, limits.max_tokens) == (MIN_QUEUED_REQS, MIN_QUEUED_TOKENS) == (1024, 2**20)


def test_given_limits_are_kept_however_small(settings: Settings) -> None:
    options = ServerOptions(max_num_queued_reqs=5, max_num_queued_tokens=6)
    assert QueueLimits.of(options, settings) == QueueLimits(5, 6, max_num_seqs=8)


def test_usage_is_the_share_of_places_that_are_taken() -> None:
    made = queue(max_requests=4)
    assert made.usage == 0.0
    with made.reserve(3):
        assert made.usage == 0.75
    made.limits = QueueLimits(max_requests=0, max_tokens=1000)
    assert made.usage is None
