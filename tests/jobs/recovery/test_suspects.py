"""The search for the line that kills the engine, without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.recovery.suspects import Suspects
from headrace.jobs.store.failure_log import Loss, Suspicion, Trial


def search(indices: list[int], poison: set[int], *, crashes: bool = False) -> tuple[set[int], set[int], int]:
    """Convicted lines, lines that were done, and the number of deaths, if `poison` lines kill the engine."""
    suspects, done, convicted, num_deaths = Suspects(Suspicion()), set[int](), set[int](), 0
    waiting = list(indices)
    while waiting:
        trial = suspects.trial
        running = [index for index in waiting if trial is None or index in trial]
        assert running, "a trial without lines"
        if poison.intersection(running):
            num_deaths += 1
            assert num_deaths < 1_000
            found = suspects.died(running, loss="engine")
            if crashes:  # only the logged state is known then
                suspects = Suspects(suspects.state, lambda index: index in done | convicted)
            if found is not None:
                convicted.add(found)
                waiting.remove(found)
            continue
        for index in running:
            done.add(index)
            waiting.remove(index)
            suspects.finished(index)
    return convicted, done, num_deaths


@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=4), st.booleans())
def test_exactly_the_poison_lines_are_convicted(num_lines: int, poison: set[int], crashes: bool) -> None:
    guilty = poison & set(range(num_lines))
    convicted, done, _ = search(list(range(num_lines)), guilty, crashes=crashes)
    assert (convicted, done) == (guilty, set(range(num_lines)) - guilty)


def test_one_among_many_is_found_in_few_deaths() -> None:
    for index in range(64):
        _, _, num_deaths = search(list(range(64)), {index})
        assert num_deaths <= 2 + 6 + 1, "two deaths, one for each halving at most, and one for proof"


def test_deaths_with_different_lines_make_no_suspects() -> None:
    suspects = Suspects(Suspicion())
    assert suspects.died([1, 2, 3], loss="engine") is None
    assert suspects.died([4, 5], loss="engine") is None
    assert suspects.trial is None


@pytest.mark.parametrize(
    "losses",
    [["engine"] * 2, ["process"] * 3, ["engine", "process", "process"], ["process", "engine", "process"]],
)
def test_proof_is_two_deaths_of_an_engine_with_the_line_alone_or_three_of_a_process(losses: list[Loss]) -> None:
    suspects = Suspects(Suspicion())
    for _ in range(2):
        suspects.died([7], loss="process")
    for loss in losses[:-1]:
        assert suspects.trial == {7}
        assert suspects.died([7], loss=loss) is None
    assert suspects.died([7], loss=losses[-1]) == 7
    assert suspects.trial is None


def test_the_last_of_a_group_was_not_alone() -> None:
    """A death by chance while it was the only one left is no evidence."""
    suspects = Suspects(Suspicion())
    for _ in range(2):
        suspects.died([0, 1, 2, 3], loss="engine")
    suspects.finished(0)
    assert suspects.died([1], loss="engine") is None
    assert suspects.died([1], loss="engine") is None
    assert suspects.died([1], loss="engine") == 1


def test_a_death_with_nothing_in_flight_changes_nothing() -> None:
    suspects = Suspects(Suspicion())
    suspects.died([1, 2], loss="engine")
    suspects.died([], loss="engine")
    assert suspects.state == Suspicion(last=[1, 2])


def test_the_half_that_must_have_the_poison_line_is_not_run_whole() -> None:
    suspects = Suspects(Suspicion())
    for _ in range(2):
        suspects.died([0, 1, 2, 3], loss="engine")
    assert suspects.trial == {0, 1}
    suspects.finished(0)
    suspects.finished(1)
    assert suspects.trial == {2}


def test_suspects_that_are_done_or_gone_are_not_waited_for() -> None:
    suspects = Suspects(Suspicion())
    for _ in range(2):
        suspects.died([0, 1, 2, 3], loss="engine")
    again = Suspects(suspects.state, lambda index: index == 0)
    assert again.trial == {1}
    again.forget([1, 2])
    assert again.trial == {3}


def test_a_group_that_has_passed_is_not_waited_for_wherever_it_is_in_the_stack() -> None:
    """Its last lines were in flight on another worker, or its trial had not run yet."""
    suspects = Suspects(Suspicion([], [Trial([2, 3], is_other_half=True), Trial([0, 1]), Trial([9], evidence=3)]))
    suspects.finished(0)
    suspects.finished(1)
    assert suspects.died([9], loss="engine") == 9
    assert suspects.trial == {2}


def test_a_trial_that_runs_goes_on_before_those_that_are_taken_over() -> None:
    suspects = Suspects(Suspicion())
    for _ in range(2):
        suspects.died([0, 1, 2, 3], loss="engine")
    suspects.adopt(Suspicion([], [Trial([9], evidence=3)]))
    assert suspects.trial == {0, 1}
    for index in range(4):
        suspects.finished(index)
    assert suspects.died([9], loss="engine") == 9, "with the evidence of the other worker"


operations = st.tuples(st.sampled_from(["died", "finished", "adopt"]), st.sets(st.integers(0, 7), min_size=1))


@given(st.lists(operations, max_size=12))
def test_no_trial_is_ever_without_lines(steps: list[tuple[str, set[int]]]) -> None:
    suspects = Suspects(Suspicion())
    for what, indices in steps:
        if what == "died":
            suspects.died(indices, loss="engine")
        elif what == "adopt":
            suspects.adopt(Suspicion([], [Trial(sorted(indices), num_lines=len(indices))]))
        else:
            suspects.forget(indices)
        assert all(trial.lines for trial in suspects.state.trials)
