"""The items that wait for a batch, oldest first."""

from __future__ import annotations

from asyncio import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Generic[Item, Result]):
    """One submitted item."""

    item: Item
    num_tokens: int
    since: float
    future: Future[Result]


class WaitingItems(Generic[Item, Result]):
    """Owns the queue. A batch is the longest run of items from its head within both limits, in order of arrival."""

    def __init__(self, *, max_batch_size: int, max_tokens_per_batch: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_tokens = max_tokens_per_batch
        self._items: dict[Future[Result], Waiting[Item, Result]] = {}  # in the order of their arrival
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def fill_a_batch(self) -> bool:
        """Whether waiting longer cannot make the next batch larger."""
        return len(self._items) >= self._max_batch_size or self._num_tokens >= self._max_tokens

    @property
    def oldest_since(self) -> float:
        return next(iter(self._items.values())).since

    def add(self, waiting: Waiting[Item, Result]) -> None:
        self._items[waiting.future] = waiting
        self._num_tokens += waiting.num_tokens

    def remove(self, future: Future[Result]) -> bool:
        """Whether it was still waiting."""
        waiting = self._items.pop(future, None)
        if waiting is None:
            return False
        self._num_tokens -= waiting.num_tokens
        return True

    def take_batch(self) -> list[Waiting[Item, Result]]:
        batch: list[Waiting[Item, Result]] = []
        num_tokens = 0
        for waiting in self._items.values():
            num_tokens += waiting.num_tokens
            if len(batch) == self._max_batch_size or num_tokens > self._max_tokens:
                break
            batch.append(waiting)
        for waiting in batch:
            self.remove(waiting.future)
        return batch

    def take_all(self) -> list[Waiting[Item, Result]]:
        everyone = list(self._items.values())
        self._items.clear()
        self._num_tokens = 0
        return everyone
