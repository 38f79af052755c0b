"""Finalists against the default. Only fresh rounds count: a config that won the race by luck does not keep its luck.

Each round has the default twice. The two tell how much equal things differ on this machine (the noise floor), and
their mean is what the finalists are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.statistics import Interval, ratio_of_rounds

MIN_ROUNDS, MAX_ROUNDS = 5, 15
MIN_SHOWN_ROUNDS = 3  # with fewer, nothing is shown
WANTED_HALF_WIDTH = 0.02
NUM_FINALISTS = 2

Verdict = Literal["tuned", "no difference shown", "the default is best", "not confirmed"]


@dataclass(frozen=True, slots=True)
class ConfirmRound:
    """The values of one round, by config hash, and the default's second value."""

    default: float
    again: float
    values: Mapping[str, float]

    @property
    def baseline(self) -> float:
        return (self.default + self.again) / 2


@dataclass(frozen=True, slots=True)
class Noise:
    """The second default against the first. `floor` is how large a difference may be that means nothing."""

    interval: Interval
    num_rounds: int

    @property
    def floor(self) -> float:
        return (self.interval.high - self.interval.low) / 2

    def as_json(self) -> dict[str, Any]:
        found = self.interval
        return {
            "ratio": found.value,
            "low": found.low,
            "high": found.high,
            "floor": self.floor,
            "num_rounds": self.num_rounds,
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """The best finalist against the default."""

    best: str  # its hash
    interval: Interval
    verdict: Verdict
    num_rounds: int

    @property
    def is_shown(self) -> bool:
        return self.verdict == "tuned"


def noise_of(rounds: Sequence[ConfirmRound]) -> Noise | None:
    found = ratio_of_rounds([each.default for each in rounds], [each.again for each in rounds], is_paired=True)
    return None if found is None else Noise(found, len(rounds))


def ratio_of(rounds: Sequence[ConfirmRound], config: str) -> Interval | None:
    """A finalist against the default, over the rounds that have it."""
    of_config = [each for each in rounds if config in each.values]
    return ratio_of_rounds(
        [each.baseline for each in of_config], [each.values[config] for each in of_config], is_paired=True
    )


def needs_more(rounds: Sequence[ConfirmRound], finalists: Sequence[str]) -> bool:
    """Whether another round is wanted. The width of the interval decides, not whether it holds 1.0: stopping at the
    first round that shows a gain would find gains where there are none."""
    if len(rounds) < MIN_ROUNDS:
        return True
    if len(rounds) >= MAX_ROUNDS:
        return False
    best = _best(rounds, finalists)
    return best is None or (best[1].high - best[1].low) / 2 > WANTED_HALF_WIDTH


def judge(rounds: Sequence[ConfirmRound], finalists: Sequence[str]) -> Finding | None:
    """None if there are too few rounds for an interval."""
    best, noise = _best(rounds, finalists), noise_of(rounds)
    if best is None or noise is None:
        return None
    name, interval = best
    verdict: Verdict = "no difference shown"
    if len(rounds) < MIN_SHOWN_ROUNDS:
        verdict = "not confirmed"
    elif interval.low > 1.0 and interval.value - 1.0 > noise.floor:
        verdict = "tuned"
    elif interval.high < 1.0:
        verdict = "the default is best"
    return Finding(name, interval, verdict, len(rounds))


def _best(rounds: Sequence[ConfirmRound], finalists: Sequence[str]) -> tuple[str, Interval] | None:
    found = [(name, ratio) for name in finalists if (ratio := ratio_of(rounds, name)) is not None]
    return max(found, key=lambda each: each[1].value) if found else None
