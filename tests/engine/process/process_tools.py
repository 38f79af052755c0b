"""Helpers of the tests of engine processes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.types import Request, SamplingParams, SequenceEvent

MAX_WAIT_S = 120.0  # a test that waits longer for anything has failed


class Inbox:
    """Receives what an engine delivers."""

    def __init__(self) -> None:
        self._queue: queue.Queue[list[SequenceEvent]] = queue.Queue()

    def deliver(self, events: list[SequenceEvent]) -> None:
        self._queue.put(events)

    def next(self) -> list[SequenceEvent]:
        return self._queue.get(timeout=MAX_WAIT_S)

    def clear(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    def until_finished(self, *request_ids: str) -> list[SequenceEvent]:
        """All events until these requests, of one sequence each, have finished."""
        events: list[SequenceEvent] = []
        while {event.request_id for event in events if event.finish_reason} < set(request_ids):
            batch = self.next()
            assert batch, "the engine has failed"
            events += batch
        return events


def make_request(request_id: str, first_token: int = 10, **params: Any) -> Request:
    prompt = np.arange(first_token, first_token + 20, dtype=np.int32)
    return Request(request_id, prompt, SamplingParams(**{"seed": 1, "max_tokens": 8} | params), watched=True)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
