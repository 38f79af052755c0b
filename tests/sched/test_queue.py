from __future__ import annotations

import numpy as np
import pytest

from headrace.sched.queue import WaitingQueue
from headrace.sched.sequence import Sequence, State
from headrace.types import Request, SamplingParams

PROMPT = np.array([1, 2, 3], np.int32)


def make_sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(
        request=Request(f"request {arrival}", PROMPT, SamplingParams(), priority=priority),
        index=0,
        seed=0,
        arrival=arrival,
        end_len=10,
        stop_token_ids=(),
        token_ids=PROMPT,
    )


def arrivals(queue: WaitingQueue) -> list[int]:
    popped = []
    while queue.head() is not None:
        popped.append(queue.pop().arrival)
    return popped


def fill(queue: WaitingQueue, *sequences: Sequence) -> WaitingQueue:
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue(by_priority=False).head() is None


def test_popping_from_an_empty_queue_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="empty queue"):
        WaitingQueue(by_priority=False).pop()


def test_first_come_is_first_served_whatever_the_priority() -> None:
    queue = WaitingQueue(by_priority=False)
    fill(queue, make_sequence(3, priority=-5), make_sequence(1, priority=9), make_sequence(2))
    assert arrivals(queue) == [1, 2, 3]


def test_a_lower_priority_number_goes_first() -> None:
    queue = WaitingQueue(by_priority=True)
    fill(queue, make_sequence(1, priority=5), make_sequence(2, priority=-1), make_sequence(3, priority=0))
    assert arrivals(queue) == [2, 3, 1]


def test_equal_priorities_go_by_arrival() -> None:
    queue = WaitingQueue(by_priority=True)
    fill(queue, make_sequence(2, priority=1), make_sequence(1, priority=1), make_sequence(3, priority=1))
    assert arrivals(queue) == [1, 2, 3]


def test_a_sequence_that_comes_back_has_its_old_place() -> None:
    queue = WaitingQueue(by_priority=False)
    fill(queue, make_sequence(1), make_sequence(2))
    back = queue.pop()
    queue.push(make_sequence(3))
    queue.push(back)
    assert arrivals(queue) == [1, 2, 3]


def test_sequences_that_ended_while_waiting_are_skipped() -> None:
    queue = WaitingQueue(by_priority=False)
    ended = make_sequence(1)
    fill(queue, ended, make_sequence(2))
    ended.state = State.FINISHED
    assert arrivals(queue) == [2]


def test_looking_at_the_head_does_not_take_it() -> None:
    queue = fill(WaitingQueue(by_priority=False), make_sequence(1))
    assert queue.head() is queue.head() is queue.pop()
