"""Finds the line that kills the engine by a binary search: smaller and smaller groups of lines run alone.

    two deaths ──▶ lines in flight at both ──▶ halves, one at a time, with no other line in flight
                                                │ all its lines finish: the group is cleared
                                                └ the engine dies: its halves ... ──▶ one line, again ──▶ it is poison

Each death writes the state to the failure log, and lines that the journal has a result for are left out when it is
read: a crash of the process that has the engine counts as one more death, also during a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.jobs.store.failure_log import Loss, Suspicion, Trial

# Of a death with one line alone. An engine may die once by chance, and a process may be killed for a reason outside the
# job: two deaths of an engine are proof, or three of a process.
EVIDENCE: dict[Loss, int] = {"engine": 3, "device": 3, "process": 2}
PROOF = 6


class Suspects:
    """Owned by the job's main loop. `is_done`: whether a line got its result after the state was written."""

    def __init__(self, state: Suspicion, is_done: Callable[[int], bool] = lambda index: False) -> None:
        self._last = [index for index in state.last if not is_done(index)]
        self._trials = list(state.trials)
        self.forget([index for trial in state.trials for index in trial.lines if is_done(index)])

    @property
    def state(self) -> Suspicion:
        return Suspicion(list(self._last), list(self._trials))

    @property
    def trial(self) -> frozenset[int] | None:
        """The lines that may run now. None: there are no suspects, and all lines may run."""
        return frozenset(self._trials[-1].lines) if self._trials else None

    @property
    def is_searching(self) -> bool:
        return bool(self._trials)

    @property
    def num_left(self) -> int:
        return sum(len(trial.lines) for trial in self._trials)

    def __contains__(self, index: int) -> bool:
        return any(index in trial.lines for trial in self._trials)

    @property
    def lines(self) -> frozenset[int]:
        """The lines of all trials."""
        return frozenset().union(*(trial.lines for trial in self._trials))

    def adopt(self, state: Suspicion) -> None:
        """Take over suspects of another worker. The trial that is here goes on: its lines may be in flight."""
        self._last = sorted({*self._last, *state.last})
        self._trials = [*state.trials, *self._trials]

    def died(self, indices: Iterable[int], *, loss: Loss) -> int | None:
        """The engine died with these lines in flight. Returns the line that is now proven to be poison, if any."""
        in_flight = sorted(indices)
        if not in_flight:
            return None  # this death says nothing about any line
        if self._trials:
            return self._narrow(in_flight, loss)
        both = sorted(set(self._last).intersection(in_flight))
        self._last = [] if both else in_flight
        if both:
            self._split(both)
        return None

    def finished(self, index: int) -> None:
        """A line has its result, an answer or an error."""
        if index in self:
            self.forget([index])

    def forget(self, indices: Iterable[int]) -> None:
        """Remove lines that are done or cannot run. A trial without lines has passed, wherever it is in the stack: if
        it stayed there, its worker would wait for it for ever once the trials above it are over."""
        gone = set(indices)
        self._last = [index for index in self._last if index not in gone]
        trials, self._trials = self._trials, []
        for trial in trials:
            left = _without(trial, gone)
            if left.lines:
                self._trials.append(left)
            elif self._trials and self._trials[-1].is_other_half:
                self._split(self._trials.pop().lines)  # so the poison line is in this half

    def _narrow(self, in_flight: list[int], loss: Loss) -> int | None:
        trial = self._trials.pop()
        if self._trials and self._trials[-1].is_other_half:
            self._push(self._trials.pop().lines)  # a poison line is in the first half; nothing is known of the other
        self._push([index for index in trial.lines if index not in in_flight])
        if len(in_flight) > 1:
            self._split(in_flight)
            return None
        was_alone = trial.num_lines == 1 and trial.lines == in_flight
        evidence = trial.evidence + EVIDENCE[loss] if was_alone else 0
        if evidence >= PROOF:
            return in_flight[0]
        self._push(in_flight, evidence=evidence)
        return None

    def _push(self, indices: Sequence[int], *, is_other_half: bool = False, evidence: int = 0) -> None:
        if indices:
            self._trials.append(Trial(list(indices), is_other_half, len(indices), evidence))

    def _split(self, indices: Sequence[int]) -> None:
        """One of these lines kills the engine."""
        middle = (len(indices) + 1) // 2
        self._push(indices[middle:], is_other_half=True)
        self._push(indices[:middle])


def _without(trial: Trial, indices: set[int]) -> Trial:
    left = [index for index in trial.lines if index not in indices]
    return Trial(left, trial.is_other_half, trial.num_lines, trial.evidence)
