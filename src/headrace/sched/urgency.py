"""Who is more urgent than whom under the priority policy, and what that means for a step. Not used under `fcfs`."""

from __future__ import annotations

from collections.abc import Callable

from headrace.sched.background import NO_LIMIT, BackgroundLimit, BackgroundPace
from headrace.sched.queue import WaitingQueue
from headrace.sched.sequence import Sequence
from headrace.sched.slots import SlotTable
from headrace.types import BACKGROUND_PRIORITY


class Urgency:
    """Compares running sequences with the head of the queue. Changes nothing."""

    def __init__(self, queue: WaitingQueue, slots: SlotTable, pace: BackgroundPace, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._slots = slots
        self._pace = pace
        self._clock = clock

    def least_urgent(self) -> Sequence:
        """The running sequence that is preempted first."""
        return max(self._slots.running(), key=self._queue.order)

    def less_urgent_than(self, head: Sequence) -> Sequence | None:
        """The least urgent running sequence, if it is less urgent than this one."""
        found = self.least_urgent()
        return found if self._queue.is_less_urgent(found, head) else None

    def is_less_urgent_than_queue(self, sequence: Sequence) -> bool:
        head = self._queue.head()
        return head is not None and self._queue.is_less_urgent(sequence, head)

    def priority_of_prompts(self, prefilling: list[Sequence], *, is_urgent: bool) -> int | None:
        """The smallest priority of a prompt that this step may compute, under the priority policy. Less urgent
        sequences do not decode meanwhile: they would make the step longer. `is_urgent`: the head of the queue starts
        at once."""
        if not self._queue.by_priority:
            return None
        prompts = [sequence.request.priority for sequence in prefilling]
        head = self._queue.head() if is_urgent else None
        return min(prompts if head is None else [*prompts, head.request.priority], default=None)

    def limit_background(self, priority: int | None) -> BackgroundLimit:
        """`priority` is that of the most urgent prompt of the step."""
        if not self._queue.by_priority or not self._pace.is_limiting(self._clock()):
            return NO_LIMIT
        is_paused = priority is not None and priority < BACKGROUND_PRIORITY
        return self._pace.limit(has_interactive=self._slots.has_interactive_decoding(), is_paused=is_paused)


def is_paused(sequence: Sequence, priority: int | None) -> bool:
    """Whether it is background work, and the step computes an interactive prompt."""
    return priority is not None and priority < BACKGROUND_PRIORITY and sequence.request.is_background
