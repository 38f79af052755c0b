"""Successive halving: who stays after a rung, and which merged configs join. Decides only; measures nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.bench.sweep.configs import SweepConfig, shown_settings
from headrace.tune.effects import Effects
from headrace.tune.knobs import Knobs

NUM_RUNGS = 3
NUM_MERGED = 2  # configs that join after a rung
MIN_KEPT = 2
NUM_LEADERS = 3  # around which merged configs are looked for
MIN_EFFECT = 0.005  # of a value that is merged, as a log of a ratio
CURIOSITY = 1.0  # standard deviations that an untried config is given in advance

Settings = Mapping[str, Any]


def ranked(configs: Sequence[SweepConfig], effects: Effects) -> list[SweepConfig]:
    """The best first. Ties stay in their order."""
    found = effects.estimates([config.settings for config in configs])
    order = sorted(range(len(configs)), key=lambda place: -found[place].log_ratio)
    return [configs[place] for place in order]


def kept(configs: Sequence[SweepConfig], effects: Effects) -> list[SweepConfig]:
    """The better half of the configs besides the default."""
    return ranked(configs, effects)[: max(MIN_KEPT, len(configs) // 2)]


def merged(
    configs: Sequence[SweepConfig],
    effects: Effects,
    knobs: Knobs,
    is_new: Callable[[Settings], bool],
    number: int = NUM_MERGED,
) -> list[SweepConfig]:
    """Untried configs that join: the one that is estimated best, then the one that may be best.

    Candidates are the leaders with up to two values changed, and the best value of every knob together.
    """
    joined: list[SweepConfig] = []
    taken: set[tuple[Any, ...]] = set()
    candidates = [each for each in _candidates(configs, effects, knobs) if is_new(each)]
    if not candidates:
        return []
    found = effects.estimates(candidates)
    for curiosity in (0.0, CURIOSITY)[:number]:
        order = sorted(range(len(candidates)), key=lambda i: -(found[i].log_ratio + curiosity * found[i].sd))
        for place in order:
            settings = candidates[place]
            if (key := knobs.effective(settings)) not in taken:
                taken.add(key)
                joined.append(config_of(settings))
                break
    return joined


def config_of(settings: Settings) -> SweepConfig:
    return SweepConfig(shown_settings(settings) if settings else "default", dict(settings))


def _candidates(configs: Sequence[SweepConfig], effects: Effects, knobs: Knobs) -> list[dict[str, Any]]:
    leaders = [config.settings for config in ranked(configs, effects)[:NUM_LEADERS]] or [{}]
    changes = [(knob.name, value) for knob in knobs.all for value in (*knob.values, knob.default)]
    found = [_best_of_each(effects, knobs)]
    for leader in leaders:
        found += [_changed(leader, [change], knobs) for change in changes]
        found += [
            _changed(leader, pair, knobs) for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]
        ]
    distinct = {tuple(sorted((name, repr(value)) for name, value in each.items())): each for each in found}
    return [each for each in distinct.values() if each]


def _changed(settings: Settings, changes: Sequence[tuple[str, Any]], knobs: Knobs) -> dict[str, Any]:
    """A config with other values; in the knobs' order, so that equal configs are equal, and without defaults."""
    values = {**settings, **dict(changes)}
    return {
        knob.name: values[knob.name] for knob in knobs.all if knob.name in values and values[knob.name] != knob.default
    }


def _best_of_each(effects: Effects, knobs: Knobs) -> dict[str, Any]:
    best = {}
    for knob in knobs.all:
        found = effects.estimates([{knob.name: value} for value in knob.values])
        place = max(range(len(found)), key=lambda i: found[i].log_ratio)
        if found[place].log_ratio > MIN_EFFECT:
            best[knob.name] = knob.values[place]
    return best
