from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.config import EngineConfig
from headrace.engine.loop import MAX_DELAY_SHARE, MAX_DELAYS, EngineLoop
from headrace.types import SequenceEvent
from tests.engine import cores
from tests.engine.process.process_tools import make_request

LONG_S = 1000.0
MAX_STEP_TOKENS = 200


class Arrivals(threading.Condition):
    """A condition whose every wait ends at once, by the next arrival. `num_together` of them arrive within the batching
    delay of each other; the next arrives only during a wait without a timeout."""

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
    num_together: int, batching_delay_s: float, *, times: int = 1, token_s: float | None = None
) -> tuple[list[set[str]], list[float | None]]:
    """Send requests one by one to an idle engine; returns the request ids of each iteration's events, and the waits."""
    iterations, arrivals, _ = _run(num_together, batching_delay_s, times, token_s)
    return iterations, arrivals.timeouts


def learned(num_together: int) -> float | None:
    return _run(num_together, LONG_S, 1, None)[2].prefill_token_s


def _run(
    num_together: int, batching_delay_s: float, times: int, token_s: float | None
) -> tuple[list[set[str]], Arrivals, EngineLoop]:
    iterations: list[set[str]] = []

    def after_step(events: list[SequenceEvent]) -> None:
        iterations.append({event.request_id for event in events})
        if not (loop.has_work or arrivals.are_left):
            loop.stop()

    def fail(error: BaseException) -> None:
        raise error

    core = cores.faulty(
        EngineConfig(model="pretend", max_num_seqs=64, max_num_batched_tokens=MAX_STEP_TOKENS), print
    ).core
    names = [f"r{i}" for i in range(num_together * times)]
    arrivals = Arrivals([lambda name=name: loop.submit(make_request(name)) for name in names], num_together)  # type: ignore[misc]
    loop = EngineLoop(
        core, after_step, fail, batching_delay_s=batching_delay_s, prefill_token_s=token_s, condition=arrivals
    )
    loop.run()
    return [ids for ids in iterations if ids], arrivals, loop


def test_requests_that_come_together_to_an_idle_engine_start_together() -> None:
    iterations, timeouts = run_loop(3, batching_delay_s=LONG_S)
    assert iterations[0] == {"r0", "r1", "r2"}
    assert timeouts == [None, LONG_S, LONG_S, LONG_S]


def test_without_a_batching_delay_the_first_starts_at_once() -> None:
    iterations, timeouts = run_loop(1, batching_delay_s=0.0)
    assert iterations[0] == {"r0"}
    assert timeouts == [None]


def test_a_request_after_one_that_was_alone_does_not_wait() -> None:
    _, timeouts = run_loop(1, batching_delay_s=LONG_S, times=3)
    assert timeouts == [None, LONG_S, None, None]


def test_after_several_the_next_waits_again() -> None:
    iterations, timeouts = run_loop(2, batching_delay_s=LONG_S, times=2)
    assert timeouts == [None, LONG_S, LONG_S] * 2
    assert {"r2", "r3"} in iterations


def test_the_delay_ends_when_a_step_is_full() -> None:
    iterations, timeouts = run_loop(40, batching_delay_s=LONG_S)
    num_in_step = -(-MAX_STEP_TOKENS // len(make_request("r").prompt_token_ids))
    assert num_in_step < 40
    assert iterations[0] == {f"r{i}" for i in range(num_in_step)}
    assert timeouts[: num_in_step + 1] == [None] + [LONG_S] * (num_in_step - 1) + [None]


def test_the_delay_of_the_first_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: float(next(clock)))
    iterations, _ = run_loop(40, batching_delay_s=1.0)
    assert len(iterations[0]) == MAX_DELAYS


def test_the_delay_grows_with_the_time_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: 0.0)
    num_tokens = len(make_request("r").prompt_token_ids)
    _, timeouts = run_loop(3, batching_delay_s=LONG_S, token_s=1.0)
    assert timeouts == [None, *(pytest.approx(MAX_DELAY_SHARE * number * num_tokens) for number in (1, 2, 3))]


def test_the_delay_is_short_compared_to_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("headrace.engine.loop.monotonic", lambda: float(next(clock)))
    num_tokens = len(make_request("r").prompt_token_ids)
    iterations, _ = run_loop(
        40, batching_delay_s=LONG_S, token_s=0.9 / (MAX_DELAY_SHARE * num_tokens)
    )  # 0.9 s each, one arrives a second
    assert iterations[0] == {"r0"}


def test_the_time_of_a_token_is_learned_from_large_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.loop.MIN_LEARNED_TOKENS", 3 * len(make_request("r").prompt_token_ids))
    assert learned(2) is None
    assert (learned(3) or 0.0) > 0.0
