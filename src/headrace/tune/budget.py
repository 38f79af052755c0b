"""The time of a search: what is spent, how long a trial takes, and how large rounds and the shortlist can be."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median

from headrace.errors import ConfigError
from headrace.tune.confirm import MIN_ROUNDS
from headrace.tune.race import NUM_MERGED
from headrace.tune.shortlist import MAX_CONFIGS, MIN_CONFIGS
from headrace.tune.trial import Trial

TRIALS_IN_BUDGET = 60  # a trial takes about this part of the budget
RUNG_SHARES = (0.5, 1.0, 1.0)  # of that, by rung; confirmation has all of it
REQUESTS_PER_SEQ = 3  # with fewer, a round mostly shows how the engine fills up and drains
FIRST_REQUESTS = 256  # of the first trial of the default, which tells how long a request takes
RESERVED_SHARE = 0.5  # of the budget, at most, for confirmation
CONFIRM_WIDTH = 4  # trials of a round of confirmation: the default twice, two finalists
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "": 1.0}


def parse_budget(text: str) -> float:
    """Seconds of `90s`, `20m`, `1.5h`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|)\s*", text.lower())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"the budget {text!r} cannot be read; examples: 90s, 20m, 1.5h")
    return float(found[1]) * UNITS[found[2]]


class Budget:
    """Owns the clock. Time that an earlier run of the search has spent counts.

    Decisions rest on `spent_s`, the time at the end of the last trial: it is in the journal, so that a search that is
    resumed decides as it did before.
    """

    def __init__(self, total_s: float, clock: Callable[[], float]) -> None:
        self.total_s = total_s
        self.spent_s = 0.0
        self._clock = clock
        self._origin = clock()
        self._runs: list[tuple[int, float, float]] = []  # requests, seconds, of which to start

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    def now_s(self) -> float:
        """What is spent at this moment."""
        return self._clock() - self._origin

    def go_on_from(self, spent_s: float) -> None:
        """So much was spent when a trial of an earlier run had ended."""
        self.spent_s = spent_s
        self._origin = self._clock() - spent_s

    def mark(self) -> float:
        self.spent_s = self.now_s()
        return self.spent_s

    def add(self, trial: Trial) -> None:
        self._runs.append((trial.num_requests, trial.seconds, trial.start_s or 0.0))

    def trial_s(self, num_requests: int) -> float:
        """How long a trial of so many requests will take, its start included."""
        if not self._runs:
            return 0.0
        start = median(each[2] for each in self._runs)
        per_request = median((seconds - begin) / max(1, count) for count, seconds, begin in self._runs)
        return start + per_request * num_requests

    def num_requests(self, share: float, total: int, max_num_seqs: int) -> int:
        """Requests of a round: as many as fit in its share of the budget, within what is fair and what is there."""
        wanted = share * self.total_s / TRIALS_IN_BUDGET
        per_request = max(1e-9, self.trial_s(1) - self.trial_s(0))
        fitting = int((wanted - self.trial_s(0)) / per_request)
        return min(total, max(fitting, REQUESTS_PER_SEQ * max_num_seqs))

    def num_configs(self, num_requests: int) -> int:
        """How large the shortlist can be, so that the race and five rounds of confirmation fit."""
        trial_s = max(1e-9, self.trial_s(num_requests))
        for_race = (self.left_s - self._reserve_s(trial_s)) / trial_s
        return max(MIN_CONFIGS, min(MAX_CONFIGS, int((for_race - sum(NUM_MERGED)) / 1.75)))

    def has_time_for_race(self, num_requests: int) -> bool:
        """Whether a trial can be made without taking confirmation's time."""
        trial_s = self.trial_s(num_requests)
        return self.left_s >= trial_s + self._reserve_s(trial_s)

    def has_time_to_confirm(self, num_requests: int) -> bool:
        """Whether two finalists can be measured in as many rounds as are wanted."""
        return self.has_time_for_round(MIN_ROUNDS * CONFIRM_WIDTH, num_requests)

    def has_time_for_round(self, num_trials: int, num_requests: int) -> bool:
        return self.left_s >= self.trial_s(num_requests) * num_trials

    def _reserve_s(self, trial_s: float) -> float:
        """Time of the confirmation. A budget that is too small for both is shared with the race."""
        return min(trial_s * MIN_ROUNDS * CONFIRM_WIDTH, RESERVED_SHARE * self.total_s)
