from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.config import EngineConfig
from headrace.engine.loop import GATHER_SHARE, MAX_GATHERS, EngineLoop
from headrace.types import SequenceEvent
from tests.engine import cores
from tests.engine.process.process_tools import make_request

LONG_S = 1000.0
MAX_STEP_TOKENS = 200


class Arrivals(threading.Condition):
    """A condition whose every wait ends at once, with the next thing to happen; `num_together` of them come in time
    for who waits for a while, the next only to who waits as long as it takes."""

    def __init__(self, happens: list[Callable[[], None]], num_together: int) -> None:
        super().__init__()
        self._happens = happens
        self._num_together = num_together
        self._num_happened = 0
        self.timeouts: list[float | None] = []

    @property
    def are_left(self) -> bool:
        return self._num_happened < len(self._happens)

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        if timeout is not None and self._num_happened % self._num_together == 0:
            return False
        self._happens[self._num_happened]()
        self._num_happened += 1
        return True


def run_loop(
    num_together: int, gather_s: float, *, times: int = 1, token_s: float | None = None
) -> tuple[list[set[str]], list[float | None]]:
    """Requests that come one by one to an idle engine: those that each turn has news of, and how the loop waited."""
    turns, arrivals, _ = _run(num_together, gather_s, times, token_s)
    return turns, arrivals.timeouts


def learned(num_together: int) -> float | None:
    return _run(num_together, LONG_S, 1, None)[2]._token_s


def _run(
    num_together: int, gather_s: float, times: int, token_s: float | None
) -> tuple[list[set[str]], Arrivals, EngineLoop]:
    turns: list[set[str]] = []

    def after_turn(events: list[SequenceEvent]) -> None:
        turns.append({event.request_id for event in events})
        if not (loop.has_work or arrivals.are_left):
            loop.stop()

    def fail(error: BaseException) -> None:
        raise error

    core = cores.faulty(
        EngineConfig(model="pretend", max_num_seqs=64, max_num_batched_tokens=MAX_STEP_TOKENS), print
    ).core
    loop = EngineLoop(core, after_turn, fail, gather_s=gather_s)
    names = [f"r{i}" for i in range(num_together * times)]
    arrivals = Arrivals([lambda name=name: loop.submit(make_request(name)) for name in names], num_together)  # type: ignore[misc]
    loop._has_events = arrivals
    loop._token_s = token_s
    loop.run()
    return [turn for turn in turns if turn], arrivals, loop


def test_requests_that_come_together_to_an_idle_engine_start_together() -> None:
    turns, timeouts = run_loop(3, gather_s=LONG_S)
    assert turns[0] == {"r0", "r1", "r2"}
    assert timeouts == [None, LONG_S, LONG_S, LONG_S]


def test_without_gathering_the_first_starts_at_once() -> None:
    turns, timeouts = run_loop(1, gather_s=0.0)
    assert turns[0] == {"r0"}
    assert timeouts == [None]


def test_who_comes_after_one_that_was_alone_does_not_wait() -> None:
    _, timeouts = run_loop(1, gather_s=LONG_S, times=3)
    assert timeouts == [None, LONG_S, None, None]


def test_after_several_the_next_waits_again() -> None:
    turns, timeouts = run_loop(2, gather_s=LONG_S, times=2)
    assert timeouts == [None, LONG_S, LONG_S] * 2
    assert {"r2", "r3"} in turns


def test_nobody_waits_longer_than_until_a_step_is_full() -> None:
    turns, timeouts = run_loop(40, gather_s=LONG_S)
    num_in_step = -(-MAX_STEP_TOKENS // len(make_request("r").prompt_token_ids))
    assert num_in_step < 40
    assert turns[0] == {f"r{i}" for i in range(num_in_step)}
    assert timeouts[: num_in_step + 1] == [None] + [LONG_S] * (num_in_step - 1) + [None]


def test_the_first_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: float(next(clock)))
    turns, _ = run_loop(40, gather_s=1.0)
    assert len(turns[0]) == MAX_GATHERS


def test_the_wait_grows_with_what_the_prompts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: 0.0)
    num_tokens = len(make_request("r").prompt_token_ids)
    _, timeouts = run_loop(3, gather_s=LONG_S, token_s=1.0)
    assert timeouts == [None, *(pytest.approx(GATHER_SHARE * number * num_tokens) for number in (1, 2, 3))]


def test_nobody_waits_longer_than_the_prompts_are_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: float(next(clock)))
    num_tokens = len(make_request("r").prompt_token_ids)
    turns, _ = run_loop(
        40, gather_s=LONG_S, token_s=0.9 / (GATHER_SHARE * num_tokens)
    )  # 0.9 s each, one comes a second
    assert turns[0] == {"r0"}


def test_the_time_of_a_token_is_learned_from_first_steps_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.LEAST_LEARNED", 3 * len(make_request("r").prompt_token_ids))
    assert learned(2) is None
    assert (learned(3) or 0.0) > 0.0
