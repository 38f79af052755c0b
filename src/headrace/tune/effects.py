"""What each value of a knob does, estimated from all rounds so far.

    log(value of a config in a round) = level of the round + effects of its values + effects of pairs of numbers
                                        + its own deviation + noise

A Gaussian model with these parts. Rounds differ in size and in the machine's mood; their levels cancel what all
configs of a round share. The effect of a number grows step by step along its ladder, so that neighbours are alike. Two
limits that pay only if both are raised are a pair. How large effects, pairs and noise are is taken from the
measurements: the combination under which they are likeliest. An estimate is shrunk accordingly, so that one
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
PAIR_SDS = (0.003, 0.03, 0.12)
DEVIATION_SHARE = 0.3  # of a pair's: changes of one knob alone cannot tell an effect from a deviation
USUAL_NOISE, NOISE_SPREAD = 0.03, 0.5  # what noise is before anything is known, and how sure that is (in log)

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
        alike = self._places.alike(self._codes, self._codes)
        best: tuple[float, float, _Scales] = (-math.inf, USUAL_NOISE, _Scales(0.0, 0.0))
        for noise, effect, pair in itertools.product(NOISE_SDS, EFFECT_SDS, PAIR_SDS):
            if pair > effect:
                continue  # it would explain changes of one knob alone as deviations, which cannot be merged
            scales = _Scales(effect, pair)
            covariance = LEVEL_SD**2 * same_round + scales.prior(alike) + noise**2 * np.eye(len(values))
            found = _log_likelihood(covariance, self._values)
            found -= 0.5 * (math.log(noise / USUAL_NOISE) / NOISE_SPREAD) ** 2
            if found > best[0]:
                best = (found, noise, scales)
        _, self.noise_sd, self._scales = best
        covariance = LEVEL_SD**2 * same_round + self._scales.prior(alike) + self.noise_sd**2 * np.eye(len(values))
        self._inverse = np.linalg.inv(covariance)

    def estimates(self, configs: Sequence[Mapping[str, Any]]) -> list[Estimate]:
        """The ratio of each config to the default; of one that was not measured, from what its values did elsewhere."""
        codes = self._places.codes(configs)
        cross = self._scales.prior(self._places.alike(codes, self._codes))  # [configs, observations]
        means = cross @ self._inverse @ self._values
        own = self._scales.prior(self._places.with_themselves(codes))
        variances = own - ((cross @ self._inverse) * cross).sum(axis=1)
        return [
            Estimate(float(mean), math.sqrt(max(0.0, float(variance))))
            for mean, variance in zip(means, variances, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Alike:
    """What two lists of configs have in common, [first, second]: steps, pairs of steps, and whether they are equal."""

    steps: Floats
    pairs: Floats
    same: Floats


@dataclass(frozen=True, slots=True)
class _Scales:
    """Standard deviations of an effect of one step and of a pair of steps."""

    effect: float
    pair: float

    def prior(self, alike: _Alike) -> Floats:
        deviation = DEVIATION_SHARE * self.pair
        return self.effect**2 * alike.steps + self.pair**2 * alike.pairs + deviation**2 * alike.same


class _Places:
    """Configs as rows of numbers: for each knob, how many steps its value lies above or below the default."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._is_ladder = np.array([knob.is_ladder for knob in knobs.all], dtype=bool)

    def codes(self, configs: Sequence[Mapping[str, Any]]) -> Floats:
        rows = [[self._place(knob.name, settings) for knob in self._knobs.all] for settings in configs]
        return np.array(rows, dtype=np.float64).reshape(len(configs), len(self._knobs.all))

    def alike(self, first: Floats, second: Floats) -> _Alike:
        """Values that are no numbers are one step each. The default has no deviation."""
        return self._compared(first[:, None, :], second[None, :, :])

    def with_themselves(self, codes: Floats) -> _Alike:
        """The same for each config and itself, [configs]."""
        return self._compared(codes, codes)

    def _compared(self, a: Floats, b: Floats) -> _Alike:
        steps = np.where(a * b > 0, np.minimum(np.abs(a), np.abs(b)), 0.0)
        equal = ((a == b) & (a != 0)).astype(np.float64)
        each = np.where(self._is_ladder, steps, equal)  # [..., knobs]
        numbers = each * self._is_ladder
        pairs = (numbers.sum(axis=-1) ** 2 - (numbers**2).sum(axis=-1)) / 2
        same = np.all(a == b, axis=-1) & np.any(a != 0, axis=-1)
        return _Alike(each.sum(axis=-1), pairs, same.astype(np.float64))

    def _place(self, name: str, settings: Mapping[str, Any]) -> int:
        knob = self._knobs.by_name[name]
        value = settings.get(name, knob.default)
        ladder = knob.ladder
        return ladder.index(value) - ladder.index(knob.default) if value in ladder else 0


def _log_likelihood(covariance: Floats, values: Floats) -> float:
    if not len(values):
        return 0.0
    factor = np.linalg.cholesky(covariance)
    solved = np.linalg.solve(factor, values)
    return float(-0.5 * solved @ solved - np.log(np.diag(factor)).sum())
