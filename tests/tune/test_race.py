from __future__ import annotations

from headrace.tune.race import config_of, kept, merged, ranked
from tests.tune.builders import DEFAULTS
from tests.tune.surfaces import switches
from tests.tune.test_effects import KNOBS, SINGLE, fitted

CONFIGS = [config_of(settings) for settings in SINGLE]
EFFECTS = fitted(SINGLE, switches, noise=0.005, num_rounds=2)


def test_the_best_is_first() -> None:
    assert ranked(CONFIGS, EFFECTS)[0].settings == {"max_num_seqs": 256}


def test_the_better_half_stays() -> None:
    stay = kept(CONFIGS, EFFECTS)
    assert len(stay) == len(CONFIGS) // 2
    assert {"block_size": 8} not in [config.settings for config in stay]


def test_at_least_two_stay() -> None:
    assert len(kept(CONFIGS[:3], EFFECTS)) == 2


def test_the_best_values_are_merged() -> None:
    first, *_ = merged(CONFIGS, EFFECTS, KNOBS, lambda settings: True)
    assert switches({**DEFAULTS, **first.settings}) > 1.2


def test_merged_configs_are_new_and_differ() -> None:
    known = {config.hash for config in CONFIGS}
    found = merged(CONFIGS, EFFECTS, KNOBS, lambda settings: config_of(settings).hash not in known)
    assert len({config.hash for config in found}) == 2
    assert not known & {config.hash for config in found}


def test_nothing_is_merged_if_nothing_is_new() -> None:
    assert merged(CONFIGS, EFFECTS, KNOBS, lambda settings: False) == []
