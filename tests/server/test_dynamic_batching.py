"""The dispatcher's rules, those of Triton's dynamic batcher and its queue policy, with a manual clock."""

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

TEST_TIMEOUT_S = 60.0  # ends a test that hangs; no result depends on it
MS = 0.001


class Bench:
    """A dispatcher with requests that stay in the engine until the test finishes them."""

    def __init__(self, **policy: Any) -> None:
        self.timer = HandTimer()
        self.dispatcher = Dispatcher(BatchPolicy(**{"max_batch_size": 8, **policy}), self.timer)
        self.started: list[str] = []
        self.refused: dict[str, Overloaded] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, *names: str, **options: Any) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(name, options))
        await settle()

    async def _request(self, name: str, options: dict[str, Any]) -> None:
        try:
            async with self.dispatcher.enter(**options):
                self.started.append(name)
                await self._ends[name].wait()
        except Overloaded as error:
            self.refused[name] = error

    async def finish(self, *names: str) -> None:
        self.release(*names)
        await settle()

    def release(self, *names: str) -> None:
        """Let requests finish at the next iteration of the loop."""
        for name in names:
            self._ends[name].set()

    async def move(self, seconds: float) -> None:
        self.timer.move(seconds)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), TEST_TIMEOUT_S))


# ---- when a batch enters


def test_without_settings_every_request_enters_at_once() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1)
        await bench.arrive("a", "b", "c")
        assert bench.started == ["a", "b", "c"]
        assert bench.dispatcher.batch_sizes == []
        assert bench.timer.num_set == 0

    run(body)


def test_a_batch_of_no_preferred_size_enters_after_the_batching_delay() -> None:
    async def body() -> None:
        bench = Bench(preferred_sizes=(4, 8), max_queue_delay_s=100 * MS)
        await bench.arrive("a", "b", "c")
        await bench.move(99 * MS)
        assert bench.started == []
        await bench.move(1 * MS)
        assert bench.started == ["a", "b", "c"]
        assert bench.dispatcher.batch_sizes == [3]

    run(body)


def test_the_batching_delay_is_that_of_the_oldest_request() -> None:
    async def body() -> None:
        bench = Bench(max_queue_delay_s=100 * MS)
        await bench.arrive("a")
        await bench.move(60 * MS)
        await bench.arrive("b")
        await bench.move(40 * MS)
        assert bench.started == ["a", "b"]

    run(body)


def test_a_request_that_completes_a_preferred_size_starts_the_batch_at_once() -> None:
    async def body() -> None:
        bench = Bench(preferred_sizes=(4,), max_queue_delay_s=100 * MS)
        await bench.arrive("a", "b", "c")
        assert bench.started == []
        await bench.arrive("d")
        assert bench.started == ["a", "b", "c", "d"]
        assert bench.timer.num_set == 0

    run(body)


def test_the_largest_preferred_size_that_can_be_formed_enters_and_the_rest_waits() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=32, preferred_sizes=(2, 4), max_queue_delay_s=100 * MS)
        await bench.arrive("running", size=32)
        await bench.arrive(*"abcdefg")
        assert bench.started == ["running"]
        await bench.finish("running")
        assert bench.dispatcher.batch_sizes == [32, 4, 2]
        assert bench.started == ["running", *"abcdef"]
        await bench.move(100 * MS)
        assert bench.started == ["running", *"abcdefg"]

    run(body)


def test_a_batch_that_fills_the_engine_enters_at_once() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=3, preferred_sizes=(2,), max_queue_delay_s=100 * MS)
        await bench.arrive("running", size=3)
        await bench.arrive(*"abcd")
        await bench.finish("running")
        assert bench.dispatcher.batch_sizes == [3, 3]
        assert bench.started == ["running", *"abc"]

    run(body)


def test_without_preferred_sizes_only_a_full_batch_enters_before_the_delay() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=3, max_queue_delay_s=100 * MS)
        await bench.arrive("a", "b")
        assert bench.started == []
        await bench.arrive("c")
        assert bench.started == ["a", "b", "c"]

    run(body)


def test_requests_wait_while_the_engine_is_full_and_enter_as_places_become_free() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=100 * MS)
        await bench.arrive("a", "b", "c", "d")
        await bench.move(1000 * MS)
        assert bench.started == ["a", "b"]
        await bench.finish("b")
        assert bench.started == ["a", "b", "c"]
        await bench.finish("a", "c", "d")
        assert bench.started == ["a", "b", "c", "d"]

    run(body)


def test_places_are_counted_in_sequences_and_the_order_is_kept() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=4, max_queue_delay_s=1 * MS)
        await bench.arrive("a", size=2)
        await bench.arrive("b", size=3)
        await bench.arrive("c", size=1)
        await bench.move(10 * MS)
        assert bench.started == ["a"]  # three do not fit beside two, and the request behind waits too
        await bench.finish("a")
        assert bench.started == ["a", "b", "c"]

    run(body)


def test_a_request_larger_than_the_engine_takes_all_places() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=1 * MS)
        await bench.arrive("a", size=50)
        assert bench.started == ["a"]
        await bench.arrive("b")
        await bench.move(10 * MS)
        assert bench.started == ["a"]
        await bench.finish("a")
        await bench.move(10 * MS)
        assert bench.started == ["a", "b"]

    run(body)


# ---- the queue policy


def full(bench: Bench) -> Awaitable[None]:
    return bench.arrive("running", size=8)


def test_reject_refuses_a_request_that_timed_out() -> None:
    async def body() -> None:
        bench = Bench(timeout_s=50 * MS)
        await full(bench)
        await bench.arrive("a")
        await bench.move(49 * MS)
        assert bench.refused == {}
        await bench.move(1 * MS)
        assert bench.refused["a"].reason == "queue_timeout"
        assert bench.dispatcher.num_waiting == 0
        assert bench.dispatcher.num_rejected == 1

    run(body)


def test_delay_moves_a_request_that_timed_out_behind_the_others() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=50 * MS, timeout_action="delay")
        await bench.arrive("running", "late")
        await bench.move(60 * MS)
        await bench.arrive("in time")
        await bench.finish("running")
        assert bench.started == ["running", "in time"]
        await bench.finish("in time")
        assert bench.started == ["running", "in time", "late"]
        assert bench.refused == {}

    run(body)


def test_a_delayed_request_enters_before_those_of_lower_priority() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=50 * MS, timeout_action="delay", by_priority=True)
        await bench.arrive("running")
        await bench.arrive("late", priority=1)
        await bench.move(60 * MS)
        await bench.arrive("low", priority=2)
        await bench.arrive("same", priority=1)
        for name in ("running", "same", "late", "low"):
            await bench.finish(name)
        assert bench.started == ["running", "same", "late", "low"]

    run(body)


def test_lower_priority_numbers_enter_first_and_ties_in_order_of_arrival() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0, by_priority=True)
        await bench.arrive("running")
        await bench.arrive("c", priority=2)
        await bench.arrive("a", "b", priority=1)
        for name in ("running", "a", "b", "c"):
            await bench.finish(name)
        assert bench.started == ["running", "a", "b", "c"]

    run(body)


def test_first_come_first_served_ignores_priorities() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0)
        await bench.arrive("running")
        await bench.arrive("a", priority=5)
        await bench.arrive("b", priority=1)
        await bench.finish("running")
        assert bench.started == ["running", "a"]

    run(body)


def test_a_request_may_shorten_but_not_lengthen_its_timeout() -> None:
    policy = BatchPolicy(max_batch_size=1, timeout_s=1.0, allow_timeout_override=True)
    assert policy.timeout_of(0.5) == 0.5
    assert policy.timeout_of(2.0) == 1.0
    assert policy.timeout_of(None) == 1.0


def test_a_timeout_in_a_request_is_refused_unless_allowed() -> None:
    with pytest.raises(RequestError, match="allow-timeout-override") as refused:
        BatchPolicy(max_batch_size=1, timeout_s=1.0).timeout_of(0.5)
    assert refused.value.param == "X-Queue-Timeout"


def test_a_shortened_timeout_expires_before_that_of_an_earlier_request() -> None:
    async def body() -> None:
        bench = Bench(timeout_s=1.0, allow_timeout_override=True)
        await full(bench)
        await bench.arrive("a")
        await bench.arrive("b", timeout_s=0.1)
        await bench.move(0.1)
        assert list(bench.refused) == ["b"]

    run(body)


# ---- cancelling and closing


def test_a_request_cancelled_while_waiting_is_removed() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=2, max_queue_delay_s=100 * MS, timeout_s=1.0)
        await bench.arrive("a")
        bench.tasks["a"].cancel()
        await settle()
        assert bench.dispatcher.num_waiting == 0
        await bench.arrive("b", "c")
        assert bench.started == ["b", "c"]

    run(body)


def test_a_request_cancelled_as_it_enters_frees_its_place() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, max_queue_delay_s=100 * MS)
        await bench.arrive("running", "a", "b")
        bench.release("running")
        while bench.dispatcher.num_waiting == 2:
            await asyncio.sleep(0)
        bench.tasks["a"].cancel()  # it has its place, but has not run since
        await settle()
        assert bench.started == ["running", "b"]
        await bench.finish("b")
        await bench.arrive("c")
        assert bench.started == ["running", "b", "c"]

    run(body)


def test_closing_refuses_all_waiting_requests() -> None:
    async def body() -> None:
        bench = Bench(max_batch_size=1, timeout_s=1.0)
        await bench.arrive("running", "a", "b")
        bench.dispatcher.close()
        await settle()
        assert {name: error.reason for name, error in bench.refused.items()} == {"a": "draining", "b": "draining"}
        assert bench.timer.num_set == 0

    run(body)


def test_the_policy_is_built_from_the_options() -> None:
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
