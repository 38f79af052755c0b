"""Which row kills the engine: found by running ever smaller groups of suspects alone.

    two deaths ──▶ rows in flight at both ──▶ halves, one at a time, nothing beside them
                                               │ all its rows end: it was not they
                                               └ the engine dies: its halves ... ──▶ one row, which is poison

The state is written down with each death, and rows that are done are left out of it by the journal: a crash of the
whole process in the middle of a search is one more death, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from headrace.jobs.trouble import Loss, Suspicion, Trial

# A process may have been killed by somebody who meant no row of it, so that is proof only when it happens again.
DEATHS_ALONE: dict[Loss, int] = {"engine": 1, "device": 1, "process": 2}


class Suspects:
    """Owned by the job's run. `is_done` says of a row whether it has had its result since the state was written."""

    def __init__(self, state: Suspicion, is_done: Callable[[int], bool] = lambda row: False) -> None:
        self._last = [row for row in state.last if not is_done(row)]
        self._trials = list(state.trials)
        self.forget([row for trial in state.trials for row in trial.rows if is_done(row)])

    @property
    def state(self) -> Suspicion:
        return Suspicion(list(self._last), list(self._trials))

    @property
    def trial(self) -> frozenset[int] | None:
        """The rows that may run now; None: there is no suspicion, and all may."""
        return frozenset(self._trials[-1].rows) if self._trials else None

    @property
    def num_left(self) -> int:
        return sum(len(trial.rows) for trial in self._trials)

    def __contains__(self, row: int) -> bool:
        return any(row in trial.rows for trial in self._trials)

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
        """These are done, or cannot be run. A trial without rows has passed, and so its twin has the row."""
        gone = set(rows)
        self._trials = [_without(trial, gone) for trial in self._trials]
        while self._trials and not self._trials[-1].rows:
            self._trials.pop()
            if self._trials and self._trials[-1].is_twin:
                self._split(self._trials.pop().rows)

    def _narrow(self, in_flight: list[int], loss: Loss) -> int | None:
        trial = self._trials.pop()
        if self._trials and self._trials[-1].is_twin:
            self._trials[-1] = Trial(self._trials[-1].rows)  # there is one in this half: of the other nothing is known
        rest = [row for row in trial.rows if row not in in_flight]
        if rest:
            self._trials.append(Trial(rest))
        if len(in_flight) > 1:
            self._split(in_flight)
            return None
        num_deaths = trial.num_deaths + 1 if trial.rows == in_flight else 1
        if num_deaths < DEATHS_ALONE[loss]:
            self._trials.append(Trial(in_flight, num_deaths=num_deaths))
            return None
        return in_flight[0]

    def _split(self, rows: Sequence[int]) -> None:
        """One of them kills the engine; there may be none left."""
        middle = (len(rows) + 1) // 2
        if rows[middle:]:
            self._trials.append(Trial(list(rows[middle:]), is_twin=True))
        self._trials.append(Trial(list(rows[:middle])))


def _without(trial: Trial, rows: set[int]) -> Trial:
    return Trial([row for row in trial.rows if row not in rows], trial.is_twin, trial.num_deaths)
