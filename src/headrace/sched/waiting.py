"""The sequences that wait to start: forks of a computed prompt first, then the queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from headrace.sched.queue import WaitingQueue
from headrace.sched.sequence import Sequence, State


class Waiting:
    """Owned by the scheduler. Siblings count from the arrival of their request on, and become forks when their parent
    has computed the prompt."""

    def __init__(self, *, by_priority: bool) -> None:
        self.queue = WaitingQueue(by_priority=by_priority)
        self.num_sequences = 0
        self.adapters: Counter[int] = Counter()  # waiting sequences of each adapter, by index
        self._forks: deque[Sequence] = deque()
        self._next_forks: list[Sequence] = []  # those whose prompt is computed in the last planned step

    @property
    def has_forks(self) -> bool:
        return bool(self._forks)

    def add(self, sequences: list[Sequence]) -> None:
        """Take in a new request: its parent is queued, the siblings wait for it."""
        for sequence in sequences:
            self._count(sequence, 1)
        self.queue.push(sequences[0])

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence."""
        self._count(sequence, 1)
        self.queue.push(sequence)

    def first(self) -> Sequence | None:
        while self._forks and self._forks[0].state is not State.WAITING:
            self._forks.popleft()
        return self._forks[0] if self._forks else self.queue.head()

    def take(self, sequence: Sequence) -> None:
        """Remove the first one, which runs now."""
        if self._forks and self._forks[0] is sequence:
            self._forks.popleft()
        else:
            self.queue.pop()
        self._count(sequence, -1)

    def drop(self, sequence: Sequence) -> None:
        """Forget one that ends before it starts; `first` passes over it."""
        self._count(sequence, -1)

    def fork_next(self, siblings: Iterable[Sequence]) -> None:
        """Their prompt is computed in the step that is planned: they can start in the one after it."""
        self._next_forks.extend(siblings)

    def fork(self, siblings: Iterable[Sequence]) -> None:
        """They can start now, since their parent has ended."""
        self._forks.extend(s for s in siblings if s.state is State.WAITING)

    def begin_step(self) -> None:
        self._forks.extend(self._next_forks)
        self._next_forks.clear()

    def _count(self, sequence: Sequence, change: int) -> None:
        self.num_sequences += change
        if sequence.adapter is not None:
            self.adapters[sequence.adapter.index] += change
