from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.config import EngineConfig
from headrace.engine.loop import MAX_GATHERS, EngineLoop
from headrace.types import SequenceEvent
from tests.engine import cores
from tests.engine.process_tools import make_request

LONG_S = 1000.0


class Arrivals(threading.Condition):
    """A condition whose every wait ends at once, with the next thing to happen, if there is one left."""

    def __init__(self, happens: list[Callable[[], None]]) -> None:
        super().__init__()
        self._happens = happens
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        if not self._happens:
            return False
        self._happens.pop(0)()
        return True


def run_loop(num_together: int, gather_s: float) -> tuple[list[set[str]], list[float | None]]:
    """Requests that come one by one to an idle engine: those that each turn has news of, and how the loop waited."""
    turns: list[set[str]] = []

    def after_turn(events: list[SequenceEvent]) -> None:
        turns.append({event.request_id for event in events})
        if not loop.has_work:
            loop.stop()

    def fail(error: BaseException) -> None:
        raise error

    core = cores.faulty(EngineConfig(model="pretend", max_num_seqs=64, max_num_batched_tokens=1024), print).core
    loop = EngineLoop(core, after_turn, fail, gather_s=gather_s)
    arrivals = Arrivals([lambda i=i: loop.submit(make_request(f"r{i}")) for i in range(num_together)])  # type: ignore[misc]
    loop._has_news = arrivals
    loop.run()
    return [turn for turn in turns if turn], arrivals.timeouts


def test_requests_that_come_together_to_an_idle_engine_start_together() -> None:
    turns, timeouts = run_loop(3, gather_s=LONG_S)
    assert turns[0] == {"r0", "r1", "r2"}
    assert timeouts == [None, LONG_S, LONG_S, LONG_S]


def test_without_gathering_the_first_starts_at_once() -> None:
    turns, timeouts = run_loop(1, gather_s=0.0)
    assert turns[0] == {"r0"}
    assert timeouts == [None]


def test_the_first_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: float(next(clock)))
    turns, _ = run_loop(40, gather_s=1.0)
    assert len(turns[0]) == MAX_GATHERS
