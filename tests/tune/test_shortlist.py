from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.tune.knobs import find_knobs
from headrace.tune.shortlist import MAX_CONFIGS, Predicted, shortlist
from tests.tune.test_knobs import ALL, DEFAULTS, a_space


def more_is_better(settings: Mapping[str, Any]) -> Predicted:
    return Predicted(settings.get("max_num_seqs", 128) + settings.get("max_num_batched_tokens", 512))


def test_the_default_is_first_and_the_list_is_short() -> None:
    found = shortlist(find_knobs(a_space()), None)
    assert found[0].is_default and found[0].origin == "default"
    assert len(found) == MAX_CONFIGS
    assert len({each.config.hash for each in found}) == MAX_CONFIGS


def test_every_knob_has_a_change_of_its_own() -> None:
    knobs = find_knobs(a_space())
    single = [each.config.settings for each in shortlist(knobs, None) if len(each.config.settings) == 1]
    assert {name for settings in single for name in settings} == set(knobs.by_name)


def test_the_combinations_that_plan_ranks_best_are_there_with_their_prediction() -> None:
    found = shortlist(find_knobs(a_space()), more_is_better)
    combined = [each for each in found if len(each.config.settings) > 1]
    assert combined[0].config.settings == {"max_num_seqs": 512, "max_num_batched_tokens": 2048}
    assert combined[0].predicted == Predicted(2560)
    assert len(combined) == MAX_CONFIGS // 4
    assert found[0].predicted == Predicted(640)


def test_configs_that_mean_the_same_are_there_once() -> None:
    knobs = find_knobs(a_space())
    found = shortlist(knobs, more_is_better)
    assert len({knobs.effective(each.config.settings) for each in found}) == len(found)


def test_vllms_own_throughput_mode_is_always_there() -> None:
    in_force = {**DEFAULTS, "performance_mode": "balanced"}
    space = a_space(engine="vllm", known=[*ALL, "performance_mode"], in_force=in_force)
    found = shortlist(find_knobs(space), None, max_configs=4)
    assert found[1].config.settings == {"performance_mode": "throughput"}


def test_a_small_budget_makes_a_small_list() -> None:
    assert len(shortlist(find_knobs(a_space()), None, max_configs=5)) == 5
