from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from headrace.tune.effects import Effects, Observation
from headrace.tune.knobs import find_knobs
from tests.tune.builders import DEFAULTS, Surface
from tests.tune.surfaces import switches, two_limits
from tests.tune.test_knobs import a_space

KNOBS = find_knobs(a_space())
SINGLE: list[dict[str, Any]] = [{knob.name: value} for knob in KNOBS.all for value in knob.values]


def fitted(configs: list[dict[str, Any]], surface: Surface, *, noise: float, num_rounds: int) -> Effects:
    rng = Random(1)
    observations = []
    for place in range(num_rounds):
        level = 100.0 * (1 + place)  # rounds of other sizes
        for settings in [{}, *configs]:
            value = level * surface({**DEFAULTS, **settings}) * (1 + noise * rng.gauss(0, 1))
            observations.append(Observation(settings, place, value))
    return Effects(KNOBS, observations)


def test_the_default_is_one() -> None:
    [found] = fitted(SINGLE, switches, noise=0.02, num_rounds=2).estimates([{}])
    assert found.ratio == 1.0 and found.sd == pytest.approx(0.0, abs=1e-6)


def test_measured_configs_have_about_their_ratio_whatever_the_rounds_level() -> None:
    effects = fitted(SINGLE, switches, noise=0.01, num_rounds=3)
    for settings, found in zip(SINGLE, effects.estimates(SINGLE), strict=True):
        assert found.ratio == pytest.approx(switches({**DEFAULTS, **settings}), abs=0.03)


def test_a_combination_is_estimated_from_its_parts() -> None:
    settings: Mapping[str, Any] = {"max_num_seqs": 256, "block_size": 32, "enable_prefix_caching": False}
    [found] = fitted(SINGLE, switches, noise=0.01, num_rounds=3).estimates([settings])
    assert found.ratio == pytest.approx(switches({**DEFAULTS, **settings}), abs=0.05)


def test_an_untried_config_is_less_certain() -> None:
    tried, untried = fitted(SINGLE, switches, noise=0.01, num_rounds=3).estimates(
        [{"max_num_seqs": 256}, {"max_num_seqs": 256, "block_size": 32}]
    )
    assert untried.sd > tried.sd


def test_values_that_pay_only_together_are_seen_as_a_pair() -> None:
    pair = {"max_num_seqs": 256, "max_num_batched_tokens": 1024}
    effects = fitted([*SINGLE, pair], two_limits, noise=0.01, num_rounds=2)
    further, other = effects.estimates(
        [{"max_num_seqs": 512, "max_num_batched_tokens": 2048}, {"max_num_seqs": 512, "block_size": 32}]
    )
    assert further.log_ratio > other.log_ratio + 0.05


def test_one_lucky_round_is_shrunk() -> None:
    observations = [Observation({}, 0, 100.0), *(Observation(settings, 0, 100.0) for settings in SINGLE[1:])]
    [found] = Effects(KNOBS, [*observations, Observation(SINGLE[0], 0, 106.0)]).estimates([SINGLE[0]])
    assert 0.0 <= found.log_ratio < math.log(1.06)


def test_noise_is_estimated() -> None:
    quiet = fitted(SINGLE, switches, noise=0.005, num_rounds=3).noise_sd
    loud = fitted(SINGLE, switches, noise=0.05, num_rounds=3).noise_sd
    assert quiet <= 0.01 < 0.03 <= loud
