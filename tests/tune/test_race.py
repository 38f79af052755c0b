from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.tune.race import config_of, kept, merged, ranked
from tests.tune.builders import DEFAULTS
from tests.tune.surfaces import switches, two_limits
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
    first, *_ = merged(CONFIGS, EFFECTS, KNOBS, lambda settings: True, 3)
    assert switches({**DEFAULTS, **first.settings}) > 1.2


def test_merged_configs_are_new_and_differ() -> None:
    known = {config.hash for config in CONFIGS}
    found = merged(CONFIGS, EFFECTS, KNOBS, lambda settings: config_of(settings).hash not in known, 3)
    assert len({config.hash for config in found}) == 3
    assert not known & {config.hash for config in found}


def test_nothing_is_merged_if_nothing_is_new() -> None:
    assert merged(CONFIGS, EFFECTS, KNOBS, lambda settings: False, 3) == []


def test_the_next_step_of_the_leader_joins() -> None:
    """Both limits were raised together, and that paid: the next step raises both again."""
    pair = {"max_num_seqs": 256, "max_num_batched_tokens": 1024}
    effects = fitted([*SINGLE, pair], two_limits, noise=0.005, num_rounds=2)
    configs = [*CONFIGS, config_of(pair)]
    known = {config.hash for config in configs}
    found = merged(configs, effects, KNOBS, lambda settings: config_of(settings).hash not in known, 3)
    assert max(two_limits({**DEFAULTS, **config.settings}) for config in found) > 1.25


def test_a_change_that_does_nothing_is_not_worth_being_made() -> None:
    lean, full = (
        config_of({"max_num_seqs": 256}),
        config_of({"max_num_seqs": 256, "capacity_policy": "guaranteed_no_evict"}),
    )
    assert ranked([full, lean], EFFECTS)[0] == lean


def test_many_changes_win_where_their_gain_is_far_above_the_noise() -> None:
    many = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "capacity_policy": "guaranteed_no_evict",
        "block_size": 32,
    }

    def surface(settings: Mapping[str, Any]) -> float:
        return 1.05 if all(settings[name] == value for name, value in many.items()) else 1.0

    effects = fitted([*SINGLE, many], surface, noise=0.003, num_rounds=2)
    assert effects.noise_sd < 0.01
    assert ranked([*CONFIGS, config_of(many)], effects)[0] == config_of(many)
