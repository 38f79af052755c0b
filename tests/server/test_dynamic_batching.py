"""The dispatcher's rules, which are those of Triton's dynamic batcher and its queue policy. Time moves by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.dynamic_batching import BatchPolicy, Dispatcher
from headrace.server.options import ServerOptions
from headrace.server.request_queue import Overloaded
from tests.hand_timer import HandTimer

PATIENCE = 30.0  # seconds until a test that hangs is given up; no result depends on it
MS = 0.001


class Bench:
    """A dispatcher with requests that stay in the engine until they are told to leave."""

    def __init__(self, **policy: Any) -> None:
        self.timer = HandTimer()
        self.dispatcher = Dispatcher(BatchPolicy(**{"max_batch_size": 8, **policy}), self.timer)
        self.started: list[str] = []
        self.refused: dict[str, Overloaded] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, **options: Any) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(name, options))
        await settle()

    async def _request(self, name: str, options: dict[str, Any]) -> None:
        try:
            async with self.dispatcher.turn(**options):
                self.started.append(name)
                await self._ends[name].wait()
        except Overloaded as error:
            self.refused[name] = error

    async def leave(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    async def move(self, seconds: float) -> None:
        self.timer.move(seconds)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), PATIENCE))


# ---- when a batch is let in


def test_without_settings_every_request_is_let_in_at_once_and_nothing_is_counted() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1)
        await bench.come("a", "b", "c")
        assert bench.started == ["a", "b", "c"]
        assert bench.dispatcher.batch_sizes == []
        assert bench.timer.num_set == 0

    run(body)


def test_a_batch_that_is_not_of_a_preferred_size_waits_for_the_delay_and_then_starts_as_it_is() -> None:
    async def body() -> None:
        bench = Bench(preferred_sizes=(4, 8), max_queue_delay_s=100 * MS)
        await bench.come("a", "b", "c")
        await bench.move(99 * MS)
        assert bench.started == []
        await bench.move(1 * MS)
        assert bench.started == ["a", "b", "c"]
        assert bench.dispatcher.batch_sizes == [3]

    run(body)


def test_the_delay_is_that_of_the_oldest_request() -> None:
    async def body() -> None:
        bench = Bench(max_queue_delay_s=100 * MS)
        await bench.come("a")
        await bench.move(60 * MS)
        await bench.come("b")
        await bench.move(40 * MS)
        assert bench.started == ["a", "b"]

    run(body)


def test_a_newcomer_that_completes_a_preferred_size_starts_the_batch_at_once() -> None:
    async def body() -> None:
        bench = Bench(preferred_sizes=(4,), max_queue_delay_s=100 * MS)
        await bench.come("a", "b", "c")
        assert bench.started == []
        await bench.come("d")
        assert bench.started == ["a", "b", "c", "d"]
        assert bench.timer.num_set == 0

    run(body)


def test_the_largest_preferred_size_that_can_be_formed_is_used_and_the_rest_waits_on() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=32, preferred_sizes=(2, 4), max_queue_delay_s=100 * MS)
        bench.dispatcher._num_taken = 32  # nobody fits until all have come
        await bench.come(*"abcdefg")
        assert bench.started == []
        bench.dispatcher._give_back(32)
        await settle()
        assert bench.dispatcher.batch_sizes == [4, 2]
        assert bench.started == list("abcdef")
        await bench.move(100 * MS)
        assert bench.started == list("abcdefg")

    run(body)


def test_a_full_engine_of_requests_starts_at_once() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=3, preferred_sizes=(2,), max_queue_delay_s=100 * MS)
        bench.dispatcher._num_taken = 3
        await bench.come(*"abcd")
        bench.dispatcher._give_back(3)
        await settle()
        assert bench.dispatcher.batch_sizes == [3]
        assert bench.started == list("abc")

    run(body)


def test_without_preferred_sizes_only_a_full_batch_starts_before_the_delay() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=3, max_queue_delay_s=100 * MS)
        await bench.come("a", "b")
        assert bench.started == []
        await bench.come("c")
        assert bench.started == ["a", "b", "c"]

    run(body)


def test_requests_wait_while_the_engine_is_full_and_take_places_as_they_become_free() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=100 * MS)
        await bench.come("a", "b", "c", "d")
        await bench.move(1000 * MS)
        assert bench.started == ["a", "b"]
        await bench.leave("b")
        assert bench.started == ["a", "b", "c"]
        await bench.leave("a", "c", "d")
        assert bench.started == ["a", "b", "c", "d"]

    run(body)


def test_sequences_count_and_nobody_is_overtaken() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=4, max_queue_delay_s=1 * MS)
        await bench.come("a", size=2)
        await bench.come("b", size=3)
        await bench.come("c", size=1)
        await bench.move(10 * MS)
        assert bench.started == ["a"]  # three do not fit beside two, and the one behind them waits too
        await bench.leave("a")
        assert bench.started == ["a", "b", "c"]

    run(body)


def test_a_request_larger_than_the_engine_takes_all_of_it() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=1 * MS)
        await bench.come("a", size=50)
        assert bench.started == ["a"]
        await bench.come("b")
        await bench.move(10 * MS)
        assert bench.started == ["a"]
        await bench.leave("a")
        await bench.move(10 * MS)
        assert bench.started == ["a", "b"]

    run(body)


# ---- the queue policy


def full(bench: Bench) -> Awaitable[None]:
    return bench.come("running", size=8)


def test_reject_refuses_a_request_whose_timeout_is_over() -> None:
    async def body() -> None:
        bench = Bench(timeout_s=50 * MS)
        await full(bench)
        await bench.come("a")
        await bench.move(49 * MS)
        assert bench.refused == {}
        await bench.move(1 * MS)
        assert bench.refused["a"].reason == "queue_timeout"
        assert bench.dispatcher.num_waiting == 0
        assert bench.dispatcher.num_rejected == 1

    run(body)


def test_delay_puts_it_behind_those_in_time_and_never_refuses_it() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=50 * MS, timeout_action="delay")
        await bench.come("running", "late")
        await bench.move(60 * MS)
        await bench.come("in time")
        await bench.leave("running")
        assert bench.started == ["running", "in time"]
        await bench.leave("in time")
        assert bench.started == ["running", "in time", "late"]
        assert bench.refused == {}

    run(body)


def test_a_late_request_goes_before_those_of_a_lower_priority() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=50 * MS, timeout_action="delay", by_priority=True)
        await bench.come("running")
        await bench.come("late", priority=1)
        await bench.move(60 * MS)
        await bench.come("low", priority=2)
        await bench.come("same", priority=1)
        for name in ("running", "same", "late", "low"):
            await bench.leave(name)
        assert bench.started == ["running", "same", "late", "low"]

    run(body)


def test_priorities_are_strict_lower_first_and_in_order_of_arrival_within_one() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0, by_priority=True)
        await bench.come("running")
        await bench.come("c", priority=2)
        await bench.come("a", "b", priority=1)
        for name in ("running", "a", "b", "c"):
            await bench.leave(name)
        assert bench.started == ["running", "a", "b", "c"]

    run(body)


def test_first_come_first_served_does_not_look_at_priorities() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0)
        await bench.come("running")
        await bench.come("a", priority=5)
        await bench.come("b", priority=1)
        await bench.leave("running")
        assert bench.started == ["running", "a"]

    run(body)


def test_a_request_may_shorten_its_timeout_and_not_lengthen_it() -> None:
    policy = BatchPolicy(max_batch_size=1, timeout_s=1.0, allow_timeout_override=True)
    assert policy.timeout_of(0.5) == 0.5
    assert policy.timeout_of(2.0) == 1.0
    assert policy.timeout_of(None) == 1.0


def test_a_timeout_of_its_own_is_refused_where_that_is_not_allowed() -> None:
    with pytest.raises(RequestError, match="allow-timeout-override") as refused:
        BatchPolicy(max_batch_size=1, timeout_s=1.0).timeout_of(0.5)
    assert refused.value.param == "X-Queue-Timeout"


def test_a_shortened_timeout_ends_before_an_earlier_request_of_the_default() -> None:
    async def body() -> None:
        bench = Bench(timeout_s=1.0, allow_timeout_override=True)
        await full(bench)
        await bench.come("a")
        await bench.come("b", timeout_s=0.1)
        await bench.move(0.1)
        assert list(bench.refused) == ["b"]

    run(body)


# ---- leaving


def test_a_request_that_is_cancelled_while_it_waits_leaves_no_trace() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=100 * MS, timeout_s=1.0)
        await bench.come("a")
        bench.tasks["a"].cancel()
        await settle()
        assert bench.dispatcher.num_waiting == 0
        await bench.come("b", "c")
        assert bench.started == ["b", "c"]

    run(body)


def test_a_request_that_is_cancelled_as_it_is_let_in_gives_its_place_back() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, max_queue_delay_s=100 * MS)
        await bench.come("running", "a", "b")
        bench._ends["running"].set()
        while bench.dispatcher.num_waiting == 2:
            await asyncio.sleep(0)
        bench.tasks["a"].cancel()  # its place was given to it, and it has not run since
        await settle()
        assert bench.started == ["running", "b"]
        await bench.leave("b")
        assert bench.dispatcher._num_taken == 0

    run(body)


def test_closing_refuses_all_that_wait() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0)
        await bench.come("running", "a", "b")
        bench.dispatcher.close()
        await settle()
        assert {name: error.reason for name, error in bench.refused.items()} == {"a": "draining", "b": "draining"}
        assert bench.timer.num_set == 0

    run(body)


def test_the_policy_comes_from_the_options() -> None:
    options = ServerOptions(
        max_queue_delay_us=1500,
        preferred_batch_size="8, 4,64",
        queue_timeout_us=20_000,
        queue_timeout_action="delay",
        allow_timeout_override=True,
    )
    assert BatchPolicy.of(options, max_num_seqs=32, by_priority=True) == BatchPolicy(
        max_batch_size=32,
        preferred_sizes=(4, 8),
        max_queue_delay_s=0.0015,
        timeout_s=0.02,
        timeout_action="delay",
        allow_timeout_override=True,
        by_priority=True,
    )
    assert BatchPolicy.of(ServerOptions(), max_num_seqs=32).is_trivial
