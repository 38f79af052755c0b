"""Which row kills the engine: found by running ever smaller groups of suspects alone.

    two deaths ──▶ rows in flight at both ──▶ halves, one at a time, nothing beside them
                                               │ all its rows end: it was not they
                                               └ the engine dies: its halves ... ──▶ one row, again ──▶ it is poison

The state is written down with each death, and rows that are done are left out of it by the journal: a crash of the
whole process in the middle of a search is one more death, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.jobs.store.failure_log import Loss, Suspicion, Trial

# Of a death with one row alone. An engine may die by chance once, and a process may be killed by somebody who meant no
# row of it: two deaths of an engine are proof, or three of a process.
EVIDENCE: dict[Loss, int] = {"engine": 3, "device": 3, "process": 2}
PROOF = 6


class Suspects:
    """Owned by the job's run. `is_done` says of a row whether it has had its result since the state was written."""

    def __init__(self, state: Suspicion, is_done: Callable[[int], bool] = lambda row: False) -> None:
        self._last = [row for row in state.last if not is_done(row)]
        self._trials = list(state.trials)
        self.forget([row for trial in state.trials for row in trial.lines if is_done(row)])

    @property
    def state(self) -> Suspicion:
        return Suspicion(list(self._last), list(self._trials))

    @property
    def trial(self) -> frozenset[int] | None:
        """The rows that may run now; None: there is no suspicion, and all may."""
        return frozenset(self._trials[-1].lines) if self._trials else None

    @property
    def num_left(self) -> int:
        return sum(len(trial.lines) for trial in self._trials)

    def __contains__(self, row: int) -> bool:
        return any(row in trial.lines for trial in self._trials)

    def died(self, rows: Iterable[int], *, loss: Loss) -> int | None:
        """The engine died with these rows in flight. What is returned is the row that is convicted, if one is."""
        in_flight = sorted(rows)
        if not in_flight:
            return None  # nothing is learned from it
        if self._trials:
            return self._narrow(in_flight, loss)
        both = sorted(set(self._last).intersection(in_flight))
        self._last = [] if both else in_flight
        if both:
            self._split(both)
        return None

    def finished(self, row: int) -> None:
        """A row has its result, whatever it is."""
        if row in self:
            self.forget([row])

    def forget(self, rows: Iterable[int]) -> None:
        """These are done, or cannot be run. A trial without rows has passed."""
        gone = set(rows)
        self._trials = [_without(trial, gone) for trial in self._trials]
        while self._trials and not self._trials[-1].lines:
            self._trials.pop()
            if self._trials and self._trials[-1].is_other_half:
                self._split(self._trials.pop().lines)  # it has the row

    def _narrow(self, in_flight: list[int], loss: Loss) -> int | None:
        trial = self._trials.pop()
        if self._trials and self._trials[-1].is_other_half:
            self._push(self._trials.pop().lines)  # there is one in this half: of the other nothing is known
        self._push([row for row in trial.lines if row not in in_flight])
        if len(in_flight) > 1:
            self._split(in_flight)
            return None
        was_alone = trial.num_lines == 1 and trial.lines == in_flight
        evidence = trial.evidence + EVIDENCE[loss] if was_alone else 0
        if evidence >= PROOF:
            return in_flight[0]
        self._push(in_flight, evidence=evidence)
        return None

    def _push(self, rows: Sequence[int], *, is_other_half: bool = False, evidence: int = 0) -> None:
        if rows:
            self._trials.append(Trial(list(rows), is_other_half, len(rows), evidence))

    def _split(self, rows: Sequence[int]) -> None:
        """One of them kills the engine; there may be none left."""
        middle = (len(rows) + 1) // 2
        self._push(rows[middle:], is_other_half=True)
        self._push(rows[:middle])


def _without(trial: Trial, rows: set[int]) -> Trial:
    left = [row for row in trial.lines if row not in rows]
    return Trial(left, trial.is_other_half, trial.num_lines, trial.evidence)
