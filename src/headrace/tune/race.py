"""Successive halving: who stays after a rung, and which merged configs join. Decides only; measures nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.bench.sweep.configs import SweepConfig, shown_settings
from headrace.tune.effects import Effects
from headrace.tune.knobs import Knob, Knobs

NUM_RUNGS = 3
NUM_MERGED = (3, 2)  # configs that join after the first rung, and after the second
MIN_KEPT = 2
NUM_LEADERS = 3  # around which merged configs are looked for
PRICE = 1 / 3  # of a changed setting, in standard deviations of the noise
CURIOSITY = 1.0  # standard deviations that an untried step is given in advance

Settings = Mapping[str, Any]


def ranked(configs: Sequence[SweepConfig], effects: Effects) -> list[SweepConfig]:
    """The best first, by worth. Ties stay in their order."""
    worth = _worth([config.settings for config in configs], effects)
    order = sorted(range(len(configs)), key=lambda place: -worth[place])
    return [configs[place] for place in order]


def kept(configs: Sequence[SweepConfig], effects: Effects) -> list[SweepConfig]:
    """The better half of the configs besides the default."""
    return ranked(configs, effects)[: max(MIN_KEPT, len(configs) // 2)]


def merged(
    configs: Sequence[SweepConfig],
    effects: Effects,
    knobs: Knobs,
    is_new: Callable[[Settings], bool],
    number: int,
) -> list[SweepConfig]:
    """Untried configs that join: the one that is estimated best, the leader with everything that may pay on top, the
    next step in the leader's direction, and the one that may be best."""
    joined: list[SweepConfig] = []
    taken: set[tuple[Any, ...]] = set()
    leaders = [config.settings for config in ranked(configs, effects)[:NUM_LEADERS]] or [{}]
    merges, steps = _merges(leaders, effects, knobs), _steps(leaders[0], knobs)
    hopeful = [_changed(leaders[0], list(_hopes(leaders[0], effects, knobs).items()), knobs)]
    wanted = ((merges, 0.0), (hopeful, 0.0), (steps, CURIOSITY), (merges, CURIOSITY), (merges, 0.0))
    for candidates, curiosity in wanted:
        found = [each for each in candidates if is_new(each) and knobs.effective(each) not in taken]
        if found and len(joined) < number:
            best = _best(found, effects, curiosity)
            taken.add(knobs.effective(best))
            joined.append(config_of(best))
    return joined


def config_of(settings: Settings) -> SweepConfig:
    return SweepConfig(shown_settings(settings) if settings else "default", dict(settings))


def _worth(configs: Sequence[Settings], effects: Effects, curiosity: float = 0.0) -> list[float]:
    """The estimate, less a price for each changed setting: a change that does nothing is not worth being made.

    The price is a part of the noise: where noise is small, so are the gains that can be seen.
    """
    price = _price(effects)
    return [
        found.log_ratio + curiosity * found.sd - price * len(settings)
        for settings, found in zip(configs, effects.estimates(configs), strict=True)
    ]


def _price(effects: Effects) -> float:
    """Of one changed setting, as a log of a ratio."""
    return PRICE * effects.noise_sd


def _best(candidates: Sequence[dict[str, Any]], effects: Effects, curiosity: float) -> dict[str, Any]:
    worth = _worth(candidates, effects, curiosity)
    return candidates[max(range(len(candidates)), key=worth.__getitem__)]


def _merges(leaders: Sequence[Settings], effects: Effects, knobs: Knobs) -> list[dict[str, Any]]:
    """The leaders with up to two values changed, and the best value of every knob together."""
    changes = [(knob.name, value) for knob in knobs.all for value in (*knob.values, knob.default)]
    found = [_best_of_each(effects, knobs)]
    for leader in leaders:
        found += [_changed(leader, [change], knobs) for change in changes]
        found += [
            _changed(leader, pair, knobs) for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]
        ]
    return _distinct(found)


def _steps(leader: Settings, knobs: Knobs) -> list[dict[str, Any]]:
    """The leader with its numbers moved by one step, each or two together."""
    ladders = [knob for knob in knobs.all if knob.is_ladder]
    moved = [knob for knob in ladders if knob.name in leader] or ladders
    moves = [(knob.name, value) for knob in moved for value in _neighbours(knob, knobs.value(leader, knob.name))]
    found = [_changed(leader, [move], knobs) for move in moves]
    found += [_changed(leader, pair, knobs) for pair in itertools.combinations(moves, 2) if pair[0][0] != pair[1][0]]
    return _distinct(found)


def _neighbours(knob: Knob, value: Any) -> list[Any]:
    place = knob.ladder.index(value)
    return [*knob.ladder[max(0, place - 1) : place], *knob.ladder[place + 1 : place + 2]]


def _distinct(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each config once, without the default."""
    distinct = {tuple(sorted((name, repr(value)) for name, value in each.items())): each for each in configs}
    return [each for each in distinct.values() if each]


def _changed(settings: Settings, changes: Sequence[tuple[str, Any]], knobs: Knobs) -> dict[str, Any]:
    """A config with other values; in the knobs' order, so that equal configs are equal, and without defaults."""
    values = {**settings, **dict(changes)}
    return {
        knob.name: values[knob.name] for knob in knobs.all if knob.name in values and values[knob.name] != knob.default
    }


def _hopes(leader: Settings, effects: Effects, knobs: Knobs) -> dict[str, Any]:
    """The values that may pay on top of the leader's, all of them: one that was unlucky in its only round is among
    them, and one round tells whether any of them pays."""
    hopes = {}
    for knob in knobs.all:
        if knob.name in leader:
            continue
        found = effects.estimates([{knob.name: value} for value in knob.values])
        place = max(range(len(found)), key=lambda i: found[i].log_ratio + CURIOSITY * found[i].sd)
        if found[place].log_ratio + CURIOSITY * found[place].sd > _price(effects):
            hopes[knob.name] = knob.values[place]
    return hopes


def _best_of_each(effects: Effects, knobs: Knobs) -> dict[str, Any]:
    best = {}
    for knob in knobs.all:
        found = effects.estimates([{knob.name: value} for value in knob.values])
        place = max(range(len(found)), key=lambda i: found[i].log_ratio)
        if found[place].log_ratio > _price(effects):
            best[knob.name] = knob.values[place]
    return best
