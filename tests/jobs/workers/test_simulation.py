"""Jobs on simulated workers end, whatever happens and in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine.start import Engine
from headrace.errors import JobError
from headrace.jobs.run.submitting import Submitter
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, Suspicion, Trial
from tests.jobs.workers.simulation import Mix, simulate, stopped_engine

Start = Callable[..., Engine]


def outcome(mix: Mix, seed: int, engine: Engine) -> dict[int, bool] | str:
    """Which lines are answered, or why the job has stopped."""
    try:
        return simulate(mix, seed, engine).is_answered
    except JobError as error:
        return str(error)


def check(seed: int, engine: Engine) -> None:
    """Several deaths by chance may look like proof against a line, or as if no line was their cause."""
    mix = Mix.of(seed)
    found = outcome(mix, seed, engine)
    if isinstance(found, str):
        assert "the engine die" in found and mix.num_deaths + len(mix.poison) > 2, (seed, found)
        return
    failed = {index for index, is_answered in found.items() if not is_answered}
    assert found.keys() == set(range(mix.num_lines)), seed
    assert failed == mix.poison_lines if mix.num_deaths < 2 else failed >= mix.poison_lines, seed


def test_a_job_with_any_mix_of_deaths_ends(start: Start) -> None:
    engine = stopped_engine(start)
    for seed in range(100):
        check(seed, engine)


@pytest.mark.slow
def test_a_job_with_any_of_many_mixes_of_deaths_ends(start: Start) -> None:
    engine = stopped_engine(start)
    for seed in range(100, 1_000):
        check(seed, engine)


@pytest.mark.parametrize("max_sequences", [22, 392])
def test_workers_that_are_equally_busy_get_more_lines(start: Start, max_sequences: int) -> None:
    """15 / 22 * 22 < 15 and 1 / 392 * 392 < 1 in floating point."""
    mix = Mix(num_lines=40, num_workers=2, max_sequences=max_sequences)
    assert sum(simulate(mix, 0, stopped_engine(start)).is_answered.values()) == 40


def test_suspects_of_an_earlier_run_that_are_missing_from_the_input_are_not_waited_for(start: Start) -> None:
    log = FailureLog(None)
    log.append(EngineDeath("engine", "gone", [50, 51], 0, Suspicion([], [Trial([50], True), Trial([51])])))
    assert sum(simulate(Mix(num_lines=3, num_workers=1), 0, stopped_engine(start), log=log).is_answered.values()) == 3


def test_a_job_that_would_wait_for_ever_stops_and_says_in_which_state_it_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Submitter, "_choose", lambda self: [])
    with pytest.raises(JobError, match=r"3 lines are left, but none is in flight.*worker 1: running"):
        simulate(Mix(num_lines=3, num_workers=2), 0, stopped_engine(start))
