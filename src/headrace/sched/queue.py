"""Waiting sequences in the order in which they should start."""

from __future__ import annotations

import heapq

from headrace.sched.sequence import Sequence, State


class WaitingQueue:
    """A heap by (priority, arrival). Arrival alone when the policy is first come, first served.

    Sequences that were aborted while waiting stay in the heap until they reach its head.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self.by_priority = by_priority
        self._heap: list[tuple[int, int, Sequence]] = []

    def order(self, sequence: Sequence) -> tuple[int, int]:
        """The sort key: the smallest starts first, and is preempted last."""
        return (sequence.request.priority if self.by_priority else 0, sequence.arrival)

    def is_less_urgent(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether it has a lower priority; the order of arrival does not count."""
        return self.by_priority and sequence.request.priority > other.request.priority

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*self.order(sequence), sequence))

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][2].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def near_head(self, num_sequences: int) -> list[Sequence]:
        """The head and about the next ones, in order."""
        return [entry[2] for entry in sorted(self._heap[:num_sequences]) if entry[2].state is State.WAITING]

    def pop(self) -> Sequence:
        head = self.head()
        assert head is not None, "popped from an empty queue"
        heapq.heappop(self._heap)
        return head
