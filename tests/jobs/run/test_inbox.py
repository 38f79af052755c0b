"""What the main loop takes from its inbox in one iteration."""

from __future__ import annotations

from queue import SimpleQueue

from headrace.jobs.input.feed import InputEnded
from headrace.jobs.run.inbox import Inbox, InboxReader
from headrace.types import SequenceEvent


def test_messages_that_have_arrived_are_taken_together_up_to_a_limit_and_in_their_order() -> None:
    inbox: Inbox = SimpleQueue()
    reader = InboxReader(inbox)
    assert list(reader.take_more(10)) == []
    for number in range(5):
        inbox.put(InputEnded(number))
    assert list(reader.take_more(0)) == []
    assert list(reader.take_more(3)) == [InputEnded(0), InputEnded(1), InputEnded(2)]
    assert list(reader.take_more(10)) == [InputEnded(3), InputEnded(4)]


def test_messages_that_were_put_aside_come_before_later_ones() -> None:
    inbox: Inbox = SimpleQueue()
    reader = InboxReader(inbox)
    events: list[SequenceEvent] = []
    for message in (InputEnded(1), events, InputEnded(2)):
        inbox.put(message)
    assert reader.take_events() == [events]
    inbox.put(InputEnded(3))
    assert list(reader.take_more(10)) == [InputEnded(1), InputEnded(2), InputEnded(3)]
