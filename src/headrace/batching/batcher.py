"""`DynamicBatcher`: single requests in, batches to a callable, single results out."""

from __future__ import annotations

import asyncio
import inspect
import math
import operator
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Number
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from headrace.arguments import checks_arguments
from headrace.batching.stats import BATCH_SIZE_BOUNDS, WAIT_SECONDS_BOUNDS, BatcherStats
from headrace.batching.waiting import Waiting, WaitingItems
from headrace.errors import BatchError, ConfigError, RequestError
from headrace.histogram import Histogram

Item = TypeVar("Item")
Result = TypeVar("Result")

# The types of an ASGI application.
Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
MAX_BODY_BYTES = 1 << 20


class Alarm(Protocol):
    def cancel(self) -> None: ...


class Timer(Protocol):
    """A clock with delayed calls. An event loop is one."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> Alarm: ...


class ItemFuture(asyncio.Future[Result]):
    """Reports a cancellation at once; a done callback would run one loop iteration later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[asyncio.Future[Result]], None]) -> None:
        super().__init__(loop=loop)
        self._on_cancel = on_cancel

    def cancel(self, msg: Any = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._on_cancel(self)
        return is_cancelled


class DynamicBatcher(Generic[Item, Result]):
    """Collects items that come one by one into batches for `fn`, which takes a list and returns one as long.

    >>> async with DynamicBatcher(model.predict, max_batch_size=32) as batcher:
    ...     result = await batcher(item)

    **When a batch starts.** Items wait in the order of their arrival. A batch takes items from the head of
    the queue, in order, up to `max_batch_size` items and `max_tokens_per_batch` tokens. It starts at once when it is
    full (by items, by tokens, or because the next item does not fit), else when its oldest item has waited
    `max_wait_ms`; in both cases not while `max_concurrent_batches` run. Items that arrive meanwhile queue up, and a
    wait that has expired by then is not started again. With `max_wait_ms=0` there is no batching delay: batches
    form only from items that arrive while another batch runs.

    **Tokens.** `size(item)` counts them, a whole number from 0. Without it: `len(item)` where the item has one (token
    ids; of text these are the characters), else 1, and 1 for a mapping. A list or tuple of anything but numbers, such
    as `(prompt, 512)`, is refused: its length says nothing.

    **Where `fn` runs.** On a thread of the batcher's own, so the event loop stays free; a coroutine function is
    awaited on the loop.

    **Refusals**, raised by `submit` as `RequestError` with these codes: `request_too_large`, an item of more tokens
    than any batch may have; `queue_full`, `max_queue_size` items wait already (running ones do not count); `closed`.

    **Failures.** What `fn` raises reaches the items of that batch only. So does a `BatchError` if it
    returns something that is not a list, tuple or array, or not one result for each item.

    **Cancelling** a waiting item (the task that awaits it, or the future from `submit`) takes it out of the queue at
    once. The result of a running one is dropped; its batch continues. For a deadline use
    `asyncio.wait_for(batcher(item), seconds)`.

    **Closing.** `close()` starts waiting items without delay and returns when all are done; `close(drain=False)`
    fails waiting items (`closed`) and returns when running batches are done. Closing twice is allowed. `async with`
    drains, unless an exception leaves the block.

    A batcher serves one event loop at a time; its methods are for that loop's thread.
    """

    @checks_arguments(ConfigError, name="DynamicBatcher")
    def __init__(
        self,
        fn: Callable[[list[Item]], Sequence[Result] | Awaitable[Sequence[Result]]],
        max_batch_size: int = 64,
        max_wait_ms: float = 20,
        max_tokens_per_batch: int = 16384,
        *,
        max_queue_size: int = 1024,
        max_concurrent_batches: int = 1,
        size: Callable[[Item], int] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """`timer` replaces the event loop's clock, for tests."""
        if not callable(fn):
            raise ConfigError(f"fn must be a callable that takes a list, got {fn!r}")
        if size is not None and not callable(size):
            raise ConfigError(f"size must be a callable that counts the tokens of an item, got {size!r}")
        _at_least_one("max_batch_size", max_batch_size)
        _at_least_one("max_tokens_per_batch", max_tokens_per_batch)
        _at_least_one("max_concurrent_batches", max_concurrent_batches)
        _at_least_one("max_queue_size", max_queue_size)
        if not isinstance(max_wait_ms, (int, float)) or not 0 <= max_wait_ms < math.inf:
            raise ConfigError(f"max_wait_ms must be a number of milliseconds from 0, got {max_wait_ms!r}")
        if max_queue_size < max_batch_size:
            raise ConfigError(
                f"max_queue_size ({max_queue_size}) must be at least max_batch_size ({max_batch_size}), or no batch "
                "would ever be full"
            )
        self._fn = fn
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._size = size or _default_size
        self._max_wait_seconds = max_wait_ms / 1000
        self._max_tokens_per_batch = max_tokens_per_batch
        self._max_queue_size = max_queue_size
        self._max_concurrent_batches = max_concurrent_batches
        self._given_timer = timer
        self._waiting: WaitingItems[Item, Result] = WaitingItems(
            max_batch_size=max_batch_size, max_tokens_per_batch=max_tokens_per_batch
        )
        self._running: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(max_concurrent_batches, "headrace-batcher")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: Alarm | None = None
        self._is_closed = False
        self._stats = BatcherStats()
        self._batch_sizes = Histogram(BATCH_SIZE_BOUNDS)
        self._waits = Histogram(WAIT_SECONDS_BOUNDS)

    @property
    def stats(self) -> BatcherStats:
        return replace(
            self._stats,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            batch_sizes=self._batch_sizes.snapshot(),
            waits=self._waits.snapshot(),
        )

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def app(self, *, parse: Callable[[Any], Item] | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> Application:
        """An ASGI application around the batcher, for uvicorn or another server.

        `POST /predict` with `{"input": ...}` answers `{"output": ...}`. `parse` makes an item of the input; what it
        refuses with a ValueError or TypeError is answered with 400, and no other request of the batch fails with it.
        `GET /health` and `GET /metrics` are for operators. It has no keys: what is beyond this machine needs a proxy.
        """
        from headrace.server.batcher_app import BatcherApp

        return BatcherApp(self, parse=parse, max_body_bytes=max_body_bytes)

    async def __call__(self, item: Item) -> Result:
        """The item's own result, once its batch has run."""
        return await self.submit(item)

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Queue an item; the future gets its result. Refusals are raised here."""
        loop = self._use_running_loop()
        num_tokens = _whole_number(self._size(item))
        self._refuse_what_cannot_wait(num_tokens)
        future: ItemFuture[Result] = ItemFuture(loop, self._forget)
        self._waiting.add(Waiting(item, num_tokens, self._timer.time(), future))
        self._start_what_is_due()
        return future

    async def close(self, *, drain: bool = True) -> None:
        """Accept no more items and wait for running batches; waiting items run first (`drain`) or fail."""
        self._use_running_loop()
        self._is_closed = True
        if not drain:
            for waiting in self._waiting.take_all():
                waiting.future.set_exception(_closed("the batcher was closed before the item's batch started"))
        self._start_what_is_due()
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> DynamicBatcher[Item, Result]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=error is None)

    # ---- submitting

    @property
    def _timer(self) -> Timer:
        assert self._loop is not None
        return self._given_timer or self._loop

    def _use_running_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return loop
        if self._loop is not None and not self._loop.is_closed() and (self._waiting or self._running):
            raise RequestError("the batcher is in use by another event loop; make one for each", code="wrong_loop")
        self._waiting.take_all()  # futures of a closed loop cannot be completed
        self._running.clear()
        self._loop = loop
        return loop

    def _refuse_what_cannot_wait(self, num_tokens: int) -> None:
        try:
            if self._is_closed:
                raise _closed("the batcher is closed")
            if num_tokens > self._max_tokens_per_batch:
                raise RequestError(
                    f"the item has {num_tokens:,} tokens, more than the {self._max_tokens_per_batch:,} of a whole "
                    "batch; shorten it, raise max_tokens_per_batch, or count otherwise with size=",
                    code="request_too_large",
                )
            if len(self._waiting) >= self._max_queue_size:
                raise RequestError(
                    f"{len(self._waiting):,} items wait already; try again later, or raise max_queue_size",
                    code="queue_full",
                )
        except RequestError:
            self._stats.num_refused += 1
            raise

    def _forget(self, future: asyncio.Future[Result]) -> None:
        """A future was cancelled."""
        if self._waiting.remove(future):
            self._stats.num_cancelled += 1
            self._set_alarm()

    # ---- starting

    def _start_what_is_due(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrent_batches and self._is_due():
            self._start(self._waiting.take_batch())
        self._set_alarm()

    def _is_due(self) -> bool:
        return self._is_closed or self._waiting.fill_a_batch or self._seconds_left() <= 0

    def _seconds_left(self) -> float:
        return self._waiting.oldest_since + self._max_wait_seconds - self._timer.time()

    def _set_alarm(self) -> None:
        """Set the timer for the oldest item. None is needed while all batches are busy: a finished one checks again."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._waiting and len(self._running) < self._max_concurrent_batches:
            self._alarm = self._timer.call_later(self._seconds_left(), self._start_what_is_due)

    def _start(self, batch: list[Waiting[Item, Result]]) -> None:
        self._count(batch)
        task = asyncio.ensure_future(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start_what_is_due()

    def _count(self, batch: list[Waiting[Item, Result]]) -> None:
        stats, now = self._stats, self._timer.time()
        waits = [now - waiting.since for waiting in batch]
        longest = max(waiting.num_tokens for waiting in batch)
        stats.num_batches += 1
        stats.num_items += len(batch)
        stats.num_tokens += sum(waiting.num_tokens for waiting in batch)
        stats.num_padding_tokens += sum(longest - waiting.num_tokens for waiting in batch)
        self._batch_sizes.observe(len(batch))
        for wait in waits:
            self._waits.observe(wait)
        stats.sum_wait_seconds += sum(waits)
        stats.longest_wait_seconds = max(stats.longest_wait_seconds, *waits)

    # ---- running

    async def _run(self, batch: list[Waiting[Item, Result]]) -> None:
        futures = [waiting.future for waiting in batch]
        try:
            results = _checked(await self._call([waiting.item for waiting in batch]), len(batch))
        except asyncio.CancelledError:
            if _is_being_cancelled():  # the event loop is shutting down
                for future in futures:
                    future.cancel()
                raise
            self._fail(futures, BatchError("the callable was cancelled"))
        except BaseException as error:  # user code: whatever it raised goes to the items of its batch
            self._fail(futures, error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        else:
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)

    async def _call(self, items: list[Item]) -> Any:
        if self._is_async:
            return await self._fn(items)  # type: ignore[misc]
        result = await asyncio.get_running_loop().run_in_executor(
            self._threads, _without_stop_iteration, self._fn, items
        )
        return await result if inspect.isawaitable(result) else result

    def _fail(self, futures: list[asyncio.Future[Result]], error: BaseException) -> None:
        self._stats.num_failed_batches += 1
        for future in futures:
            if not future.done():
                future.set_exception(error)


def _without_stop_iteration(fn: Callable[[list[Item]], Any], items: list[Item]) -> Any:
    """Replace StopIteration, which a future cannot carry."""
    try:
        return fn(items)
    except StopIteration as error:
        raise BatchError("the callable raised StopIteration") from error


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _checked(results: Any, num_items: int) -> Any:
    is_list = hasattr(results, "__len__") and hasattr(results, "__getitem__")
    if not is_list or isinstance(results, (str, bytes, Mapping)):
        raise BatchError(f"the callable must return a list of {num_items} results, got {type(results).__name__}")
    if len(results) != num_items:
        raise BatchError(f"the callable returned {len(results)} results for {num_items} items")
    return results


def _whole_number(num_tokens: Any) -> int:
    try:
        number = operator.index(num_tokens)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"size must give a whole number from 0, got {num_tokens!r}")
    return number


def _default_size(item: Any) -> int:
    if isinstance(item, Mapping):
        return 1
    if isinstance(item, (list, tuple)) and not all(issubclass(kind, Number) for kind in set(map(type, item))):
        raise ConfigError(
            f"the tokens of a {type(item).__name__} are not its length, since not all of its elements are numbers; "
            "give size=, a callable that counts them"
        )
    try:
        return len(item)
    except TypeError:
        return 1


def _closed(message: str) -> RequestError:
    return RequestError(message, code="closed")


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number from 1, got {value!r}")
