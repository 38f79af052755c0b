"""The rules of the batcher, with a manual clock and a callable whose batches the test completes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from headrace import DynamicBatcher
from headrace.errors import BatchError, ConfigError, RequestError
from tests.hand_timer import HandTimer

TEST_TIMEOUT_S = 60.0  # ends a test that hangs; no result depends on it


class HandModel:
    """A coroutine function that records its batches and completes each when `release` is called with its index."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._gates: dict[int, asyncio.Event] = {}

    async def __call__(self, items: list[Any]) -> list[Any]:
        index = len(self.batches)
        self.batches.append(items)
        await self._gates.setdefault(index, asyncio.Event()).wait()
        return [f"<{item}>" for item in items]

    def release(self, *indexes: int) -> None:
        for index in indexes:
            self._gates.setdefault(index, asyncio.Event()).set()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), TEST_TIMEOUT_S))


def by_hand(**options: Any) -> tuple[DynamicBatcher[Any, Any], HandModel, HandTimer]:
    model, timer = HandModel(), HandTimer()
    return DynamicBatcher(model, timer=timer, size=options.pop("size", lambda item: 1), **options), model, timer


# ---- when a batch starts


def test_a_full_batch_starts_without_waiting() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=3)
        futures = [batcher.submit(i) for i in range(3)]
        await settle()
        assert model.batches == [[0, 1, 2]]
        model.release(0)
        assert [await future for future in futures] == ["<0>", "<1>", "<2>"]

    run(body)


def test_a_partial_batch_starts_when_its_oldest_item_has_waited_max_wait() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=3, max_wait_ms=20)
        batcher.submit("a")
        timer.move(0.015)
        batcher.submit("b")
        timer.move(0.004)
        await settle()
        assert model.batches == []
        timer.move(0.001)  # 20 ms for a, 5 ms for b
        await settle()
        assert model.batches == [["a", "b"]]

    run(body)


def test_after_a_batch_the_wait_of_the_next_oldest_item_counts() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=2, max_wait_ms=20, max_concurrent_batches=2)
        batcher.submit("a")
        timer.move(0.015)
        batcher.submit("b")
        batcher.submit("c")
        timer.move(0.019)
        await settle()
        assert model.batches == [["a", "b"]]
        timer.move(0.001)
        await settle()
        assert model.batches == [["a", "b"], ["c"]]

    run(body)


def test_tokens_fill_a_batch() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_tokens_per_batch=10, size=len, max_concurrent_batches=4)
        batcher.submit("aaaa")
        await settle()
        assert model.batches == []
        batcher.submit("bbbbbb")  # 10 exactly
        await settle()
        assert model.batches == [["aaaa", "bbbbbb"]]
        batcher.submit("ccccccc")
        batcher.submit("dddd")  # 11 do not fit
        await settle()
        assert model.batches[1:] == [["ccccccc"]]
        batcher.submit("eeeeee")  # 4 + 6
        await settle()
        assert model.batches[2:] == [["dddd", "eeeeee"]]

    run(body)


def test_a_smaller_item_does_not_overtake_a_larger_one() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_tokens_per_batch=10, size=len)
        for item in ("a" * 6, "b" * 9, "c"):
            batcher.submit(item)
        await settle()
        assert model.batches == [["a" * 6]]
        model.release(0)
        await settle()
        assert model.batches[1:] == [["b" * 9, "c"]]

    run(body)


def test_items_that_arrive_while_a_batch_runs_start_when_it_ends() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=2, max_wait_ms=20)
        for i in range(7):
            batcher.submit(i)
        await settle()
        assert model.batches == [[0, 1]]
        assert timer.num_set == 0  # the end of a batch starts the next one
        model.release(0, 1, 2)
        await settle()
        assert model.batches == [[0, 1], [2, 3], [4, 5]]
        timer.move(0.02)
        await settle()
        assert model.batches[3:] == [[6]]

    run(body)


def test_a_wait_that_expired_during_a_batch_is_not_repeated() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=2, max_wait_ms=20)
        for i in range(3):
            batcher.submit(i)
        timer.move(0.5)
        model.release(0)
        await settle()
        assert model.batches == [[0, 1], [2]]

    run(body)


def test_without_a_wait_batches_form_only_while_another_runs() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_wait_ms=0)
        for i in range(4):
            batcher.submit(i)
        await settle()
        assert model.batches == [[0]]
        model.release(0)
        await settle()
        assert model.batches == [[0], [1, 2, 3]]

    run(body)


def test_at_most_max_concurrent_batches_run_at_once() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=1, max_concurrent_batches=2)
        futures = [batcher.submit(i) for i in range(4)]
        await settle()
        assert model.batches == [[0], [1]]
        assert batcher.stats.num_running == 2 and batcher.stats.num_waiting == 2
        model.release(1)
        await settle()
        assert model.batches == [[0], [1], [2]]
        assert futures[1].done() and not futures[0].done()

    run(body)


def test_the_event_loops_own_clock_is_the_default() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda items: items, max_wait_ms=1)
        assert await batcher("a") == "a"
        assert batcher.stats.num_batches == 1

    run(body)


# ---- where the callable runs


def test_a_plain_function_runs_on_a_thread_without_blocking_the_loop() -> None:
    async def body() -> None:
        started, may_end, threads = asyncio.Event(), threading.Event(), []
        loop = asyncio.get_running_loop()

        def slow(items: list[int]) -> list[int]:
            threads.append(threading.current_thread())
            loop.call_soon_threadsafe(started.set)
            assert may_end.wait(TEST_TIMEOUT_S)
            return [-item for item in items]

        batcher = DynamicBatcher(slow, max_batch_size=2)
        futures = [batcher.submit(1), batcher.submit(2)]
        await started.wait()  # the loop runs while the function blocks
        may_end.set()
        assert [await future for future in futures] == [-1, -2]
        assert threads[0] is not threading.current_thread()

    run(body)


def test_a_coroutine_returned_by_a_plain_function_is_awaited() -> None:
    async def later(items: list[int], step: int) -> list[int]:
        return [item + step for item in items]

    async def body() -> None:
        assert await DynamicBatcher(lambda items: later(items, 2), max_wait_ms=0)(1) == 3

    run(body)


@pytest.mark.parametrize("answer", [lambda n: list(range(n)), lambda n: tuple(range(n)), np.arange])
def test_lists_tuples_and_arrays_are_results(answer: Callable[[int], Any]) -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda items: answer(len(items)), max_batch_size=3)
        assert await asyncio.gather(*(batcher(i) for i in "abc")) == [0, 1, 2]

    run(body)


# ---- refusals


def test_an_item_larger_than_a_batch_is_refused_with_both_numbers_and_others_run() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_tokens_per_batch=10, size=len)
        waiting = batcher.submit("aa")
        with pytest.raises(RequestError, match="11 tokens, more than the 10 of a whole batch") as refusal:
            batcher.submit("b" * 11)
        assert refusal.value.code == "request_too_large"
        batcher.submit("c" * 8)  # exactly full
        model.release(0)
        assert await waiting == "<aa>"
        assert batcher.stats.num_refused == 1

    run(body)


def test_a_full_queue_refuses_items_until_there_is_room() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=2, max_queue_size=3)
        for i in range(5):  # two run, three wait
            batcher.submit(i)
        with pytest.raises(RequestError, match="3 items wait already") as refusal:
            await batcher(5)
        assert refusal.value.code == "queue_full"
        await settle()
        model.release(0)
        await settle()
        batcher.submit(6)
        assert batcher.stats.num_waiting == 2

    run(body)


def test_a_cancelled_item_frees_its_place_in_the_queue_at_once() -> None:
    async def body() -> None:
        batcher, _, _ = by_hand(max_batch_size=1, max_queue_size=1)
        batcher.submit("runs")
        waits = batcher.submit("waits")
        waits.cancel()
        batcher.submit("takes its place")  # no loop iteration in between
        assert batcher.stats.num_waiting == 1

    run(body)


@pytest.mark.parametrize("size", [lambda item: -1, lambda item: 1.5, lambda item: None])
def test_a_size_that_is_not_a_count_is_refused(size: Callable[[Any], Any]) -> None:
    async def body() -> None:
        batcher, _, _ = by_hand(size=size)
        with pytest.raises(ConfigError, match="size must give a whole number"):
            batcher.submit("a")
        assert batcher.stats.num_waiting == 0

    run(body)


@pytest.mark.parametrize(
    ("item", "num_tokens"),
    [([7, 8, 9], 3), ("text", 4), (np.arange(5), 5), (np.array(1.0), 1), (3.5, 1), ({"a": 1, "b": 2}, 1), (b"", 0)],
)
def test_the_default_size_is_the_length_of_the_item_if_it_has_one(item: Any, num_tokens: int) -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda items: items, max_wait_ms=0)
        await batcher(item)
        assert batcher.stats.num_tokens == num_tokens

    run(body)


@pytest.mark.parametrize("item", [("a long prompt", 512), ["some", "words"], ([1, 2], {"top_k": 3})])
def test_an_item_whose_length_is_not_its_tokens_needs_a_size(item: Any) -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda items: items, max_wait_ms=0)
        with pytest.raises(ConfigError, match=f"the tokens of a {type(item).__name__} .* give size="):
            batcher.submit(item)
        async with DynamicBatcher(lambda items: items, max_wait_ms=0, size=lambda item: len(item[0])) as counting:
            await counting(item)
            assert counting.stats.num_tokens == len(item[0])

    run(body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number from 1, got 0"),
        ({"max_tokens_per_batch": 1.5}, "max_tokens_per_batch must be a whole number"),
        ({"max_wait_ms": -1}, "max_wait_ms must be a number of milliseconds from 0, got -1"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms"),
        ({"max_concurrent_batches": True}, "max_concurrent_batches"),
        ({"max_batch_size": 64, "max_queue_size": 63}, r"max_queue_size \(63\) must be at least max_batch_size \(64\)"),
        ({"size": 5}, "size must be a callable that counts the tokens of an item, got 5"),
        ({"max_batchsize": 3}, "no argument 'max_batchsize', did you mean 'max_batch_size'"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DynamicBatcher(lambda items: items, **options)


def test_a_value_that_is_not_callable_is_refused() -> None:
    with pytest.raises(ConfigError, match="fn must be a callable"):
        DynamicBatcher([1, 2])  # type: ignore[arg-type]


# ---- cancelling


def test_a_cancelled_waiting_item_is_not_run() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_wait_ms=20)
        task = asyncio.ensure_future(batcher("a"))
        other = batcher.submit("b")
        await settle()
        task.cancel()
        await settle()
        assert task.cancelled() and batcher.stats.num_waiting == 1
        timer.move(0.02)
        model.release(0)
        assert await other == "<b>"
        assert model.batches == [["b"]]
        assert batcher.stats.num_cancelled == 1 and batcher.stats.num_items == 1

    run(body)


def test_after_the_oldest_item_is_cancelled_the_wait_of_the_next_counts() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_wait_ms=20)
        oldest = batcher.submit("a")
        timer.move(0.015)
        batcher.submit("b")
        oldest.cancel()
        timer.move(0.005)  # 20 ms for a
        await settle()
        assert model.batches == []
        timer.move(0.015)
        await settle()
        assert model.batches == [["b"]]

    run(body)


def test_cancelling_a_running_item_does_not_affect_the_others() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=2)
        first, second = batcher.submit("a"), batcher.submit("b")
        await settle()
        first.cancel()
        model.release(0)
        assert await second == "<b>"
        assert first.cancelled() and model.batches == [["a", "b"]]

    run(body)


def test_a_timeout_removes_a_waiting_item() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher("a"), 0)
        assert batcher.stats.num_waiting == 0 and model.batches == []

    run(body)


# ---- failures


def test_an_exception_fails_only_the_items_of_its_batch() -> None:
    def fails_on_bad(items: list[str]) -> list[str]:
        if "bad" in items:
            raise ZeroDivisionError("bad item")
        return items

    async def body() -> None:
        batcher = DynamicBatcher(fails_on_bad, max_batch_size=2)
        items = ["a", "b", "c", "bad", "d", "e"]
        outcomes = await asyncio.gather(*(batcher(item) for item in items), return_exceptions=True)
        assert outcomes[:2] == ["a", "b"] and outcomes[4:] == ["d", "e"]
        assert all(isinstance(outcome, ZeroDivisionError) for outcome in outcomes[2:4])
        assert batcher.stats.num_failed_batches == 1

    run(body)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1, 2], "returned 2 results for 3 items"),
        ([1, 2, 3, 4], "returned 4 results for 3 items"),
        (None, "must return a list of 3 results, got NoneType"),
        ("abc", "must return a list of 3 results, got str"),
        ({1: 1, 2: 2, 3: 3}, "got dict"),
        (iter([1, 2, 3]), "got list_iterator"),
    ],
)
def test_an_invalid_result_fails_the_batch_with_both_numbers(answer: Any, message: str) -> None:
    async def body() -> None:
        answers = [answer, ["x"]]
        batcher: DynamicBatcher[str, Any] = DynamicBatcher(lambda items: answers.pop(0), max_batch_size=3)
        outcomes = await asyncio.gather(*(batcher(item) for item in "abc"), return_exceptions=True)
        assert all(isinstance(outcome, BatchError) and message in str(outcome) for outcome in outcomes)
        next_one = batcher.submit("d")
        await batcher.close()
        assert await next_one == "x"

    run(body)


def test_a_stop_iteration_fails_the_batch() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda items: [next(iter(())) for _ in items], max_wait_ms=0)
        with pytest.raises(BatchError, match="StopIteration"):
            await batcher("a")

    run(body)


def test_a_callable_that_raises_cancelled_error_fails_its_batch_without_cancelling() -> None:
    async def cancels_itself(items: list[str]) -> list[str]:
        raise asyncio.CancelledError

    async def body() -> None:
        with pytest.raises(BatchError, match="the callable was cancelled"):
            await DynamicBatcher(cancels_itself, max_wait_ms=0)("a")

    run(body)


# ---- closing


def test_close_runs_waiting_items_at_once_within_the_limits() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=2, max_wait_ms=20)
        futures = [batcher.submit(i) for i in range(5)]
        model.release(0, 1, 2)
        await batcher.close()
        assert timer.now == 0
        assert model.batches == [[0, 1], [2, 3], [4]]
        assert [future.result() for future in futures] == [f"<{i}>" for i in range(5)]

    run(body)


def test_close_without_draining_fails_waiting_items_and_finishes_running_ones() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=2)
        futures = [batcher.submit(i) for i in range(3)]
        await settle()
        closing = asyncio.ensure_future(batcher.close(drain=False))
        await settle()
        assert not closing.done()
        with pytest.raises(RequestError, match="closed before the item's batch started"):
            await futures[2]
        model.release(0)
        await closing
        assert [future.result() for future in futures[:2]] == ["<0>", "<1>"]
        assert model.batches == [[0, 1]]

    run(body)


def test_use_after_close_is_refused_and_closing_again_is_allowed() -> None:
    async def body() -> None:
        batcher, _, _ = by_hand()
        await batcher.close()
        await batcher.close(drain=False)
        with pytest.raises(RequestError, match="the batcher is closed") as refusal:
            await batcher("a")
        assert refusal.value.code == "closed"

    run(body)


def test_a_draining_close_can_be_followed_by_one_that_fails_waiting_items() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand(max_batch_size=1)
        _, second = batcher.submit(0), batcher.submit(1)
        draining = asyncio.ensure_future(batcher.close())
        await settle()
        model.release(0)
        await batcher.close(drain=False)
        await draining
        with pytest.raises(RequestError, match="closed"):
            await second

    run(body)


def test_a_context_drains_at_its_end_and_fails_waiting_items_on_an_exception() -> None:
    async def body() -> None:
        batcher, model, _ = by_hand()
        model.release(0)
        async with batcher:
            future = batcher.submit("a")
        assert future.result() == "<a>"
        broken, _, _ = by_hand()
        waiting = broken.submit("b")
        with pytest.raises(ZeroDivisionError):
            async with broken:
                raise ZeroDivisionError
        with pytest.raises(RequestError, match="closed"):
            await waiting

    run(body)


# ---- event loops and statistics


def test_an_idle_batcher_can_move_to_another_event_loop_without_items_of_the_last() -> None:
    batcher = DynamicBatcher(lambda items: items, max_batch_size=2, max_wait_ms=3_600_000)

    async def leave_one() -> None:
        batcher.submit("left behind")

    async def two() -> list[str]:
        return await asyncio.gather(batcher("a"), batcher("b"))

    asyncio.run(leave_one())
    assert asyncio.run(two()) == ["a", "b"]


def test_a_batcher_in_use_refuses_another_event_loop() -> None:
    async def body() -> None:
        batcher, _, _ = by_hand()
        batcher.submit("a")

        async def elsewhere() -> None:
            batcher.submit("b")

        with pytest.raises(RequestError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, elsewhere())

    run(body)


def test_statistics_count_batches_items_tokens_and_waits() -> None:
    async def body() -> None:
        batcher, model, timer = by_hand(max_batch_size=2, max_wait_ms=20, size=len, max_concurrent_batches=2)
        batcher.submit("aa")
        timer.move(0.01)
        batcher.submit("bbbb")
        batcher.submit("c")
        timer.move(0.02)
        model.release(0, 1)
        await settle()
        stats = batcher.stats
        assert (stats.num_batches, stats.num_items, stats.num_tokens) == (2, 3, 7)
        assert (stats.mean_batch_size, stats.mean_batch_tokens) == (1.5, 3.5)
        assert stats.mean_wait_ms == pytest.approx(10.0)  # 10, 0 and 20
        assert stats.longest_wait_seconds == pytest.approx(0.02)
        assert (stats.num_waiting, stats.num_running) == (0, 0)

    run(body)


def test_hundreds_of_tasks_each_get_their_own_result() -> None:
    async def body() -> None:
        async with DynamicBatcher(lambda items: [3 * item for item in items], 7, max_concurrent_batches=3) as batcher:
            assert await asyncio.gather(*(batcher(i) for i in range(500))) == [3 * i for i in range(500)]
            assert batcher.stats.num_items == 500

    run(body)
