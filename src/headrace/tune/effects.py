"""What each value of a knob does, estimated from all rounds so far.

    log(value of a config in a round) = level of the round + effects of its values, summed + its own deviation + noise

A Gaussian model with these four parts. Rounds differ in size and in the machine's mood; their levels cancel what all
configs of a round share. The effect of a number grows step by step along its ladder, so that neighbours are alike. A
deviation is what a combination has beyond the sum of its parts. How large effects, deviations and noise are is taken
from the measurements: the combination under which they are likeliest. An estimate is shrunk accordingly, so that one
lucky round of a new config does not win a race.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.tune.knobs import Knobs

LEVEL_SD = 10.0  # of rounds: anything
NOISE_SDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
EFFECT_SDS = (0.01, 0.05, 0.2)
DEVIATION_SDS = (0.005, 0.02, 0.06, 0.2)
USUAL_NOISE, NOISE_SPREAD = 0.03, 1.0  # what noise is before anything is known, and how sure that is (in log)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """The value of one config in one round. `round` is any number that is equal within a round."""

    settings: Mapping[str, Any]
    round: int
    value: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """The log of the ratio to the default, and its standard deviation."""

    log_ratio: float
    sd: float

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)


class Effects:
    """A fit to some observations."""

    def __init__(self, knobs: Knobs, observations: Sequence[Observation]) -> None:
        self._places = _Places(knobs)
        self._codes = self._places.codes([each.settings for each in observations])
        rounds = np.array([each.round for each in observations])
        values = np.log(np.array([each.value for each in observations]))
        self._values = values - values.mean() if len(values) else values
        same_round = (rounds[:, None] == rounds[None, :]).astype(np.float64)
        shared, same = self._places.shared(self._codes, self._codes), _same(self._codes, self._codes)
        best = (-math.inf, NOISE_SDS[0], EFFECT_SDS[0], DEVIATION_SDS[0])
        for noise, effect, deviation in itertools.product(NOISE_SDS, EFFECT_SDS, DEVIATION_SDS):
            covariance = LEVEL_SD**2 * same_round + effect**2 * shared + deviation**2 * same
            covariance += noise**2 * np.eye(len(values))
            found = _log_likelihood(covariance, self._values)
            found -= 0.5 * (math.log(noise / USUAL_NOISE) / NOISE_SPREAD) ** 2
            best = max(best, (found, noise, effect, deviation))
        _, self.noise_sd, self._effect_sd, self._deviation_sd = best
        covariance = LEVEL_SD**2 * same_round + self._prior(shared, same) + self.noise_sd**2 * np.eye(len(values))
        self._inverse = np.linalg.inv(covariance)

    def estimates(self, configs: Sequence[Mapping[str, Any]]) -> list[Estimate]:
        """The ratio of each config to the default; of one that was not measured, from what its values did elsewhere."""
        codes = self._places.codes(configs)
        shared, same = self._places.shared(codes, self._codes), _same(codes, self._codes)
        cross = self._prior(shared, same)  # [configs, observations]
        means = cross @ self._inverse @ self._values
        own = self._effect_sd**2 * np.abs(codes).sum(axis=1) + self._deviation_sd**2 * np.any(codes != 0, axis=1)
        variances = own - np.einsum("ij,jk,ik->i", cross, self._inverse, cross)
        return [
            Estimate(float(mean), math.sqrt(max(0.0, float(variance))))
            for mean, variance in zip(means, variances, strict=True)
        ]

    def _prior(self, shared: Floats, same: Floats) -> Floats:
        return self._effect_sd**2 * shared + self._deviation_sd**2 * same


class _Places:
    """Configs as rows of numbers: for each knob, how many steps its value lies above or below the default."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._is_ladder = np.array([knob.is_ladder for knob in knobs.all], dtype=bool)

    def codes(self, configs: Sequence[Mapping[str, Any]]) -> Floats:
        rows = [[self._place(knob.name, settings) for knob in self._knobs.all] for settings in configs]
        return np.array(rows, dtype=np.float64).reshape(len(configs), len(self._knobs.all))

    def shared(self, first: Floats, second: Floats) -> Floats:
        """[first, second]: how many steps two configs have in common. Values that are no numbers are one step each."""
        a, b = first[:, None, :], second[None, :, :]
        steps = np.where(a * b > 0, np.minimum(np.abs(a), np.abs(b)), 0.0)
        equal = ((a == b) & (a != 0)).astype(np.float64)
        total: Floats = np.where(self._is_ladder, steps, equal).sum(axis=2)
        return total

    def _place(self, name: str, settings: Mapping[str, Any]) -> int:
        knob = self._knobs.by_name[name]
        value = settings.get(name, knob.default)
        ladder = knob.ladder
        return ladder.index(value) - ladder.index(knob.default) if value in ladder else 0


def _same(first: Floats, second: Floats) -> Floats:
    """1 where two configs are the same one, and not the default: the default has no deviation."""
    equal = np.all(first[:, None, :] == second[None, :, :], axis=2) & np.any(first != 0, axis=1)[:, None]
    found: Floats = equal.astype(np.float64)
    return found


def _log_likelihood(covariance: Floats, values: Floats) -> float:
    if not len(values):
        return 0.0
    factor = np.linalg.cholesky(covariance)
    solved = np.linalg.solve(factor, values)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())
