"""The rules of the batcher, with a manual clock and a callable whose batches the test completes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace import DynamicBatcher
from headrace.errors import ConfigError, RequestError
from tests.batching.by_hand import TEST_TIMEOUT_S, by_hand, run, settle

# When a batch starts.


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


# Where the callable runs.


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


# Refusals.


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
