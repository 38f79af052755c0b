"""Items that are cancelled or fail, and batchers that are closed or move to another event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace import DynamicBatcher
from headrace.errors import BatchError, RequestError
from tests.batching.by_hand import by_hand, run, settle


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
