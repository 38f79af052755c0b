"""The configs that a race starts with: the default, changes of one knob, and the combinations that plan ranks best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.sweep.configs import SweepConfig
from headrace.tune.knobs import Knobs
from headrace.tune.race import config_of

MAX_CONFIGS, MIN_CONFIGS = 10, 4  # with the default
MAX_COMBINED = 3  # of the limits of a step
LIMITS = ("max_num_seqs", "max_num_batched_tokens")
ALWAYS = ({"performance_mode": "throughput"},)

Origin = Literal["default", "shortlist", "recombined"]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What plan expects. Without an error band, low and high are None."""

    value: float
    low: float | None = None
    high: float | None = None


Forecast = Callable[[Mapping[str, Any]], Predicted | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    config: SweepConfig
    origin: Origin
    predicted: Predicted | None = None

    @property
    def is_default(self) -> bool:
        return not self.config.settings


def shortlist(knobs: Knobs, forecast: Forecast | None, max_configs: int = MAX_CONFIGS) -> list[Candidate]:
    """At most `max_configs`, the default first. Configs that mean the same are there once."""
    predictions = _Predictions(forecast)
    found: dict[tuple[Any, ...], dict[str, Any]] = {knobs.effective({}): {}}
    wanted = itertools.chain(_always(knobs), _combined(knobs, predictions, max_configs), _single(knobs))
    for settings in wanted:
        if len(found) >= max_configs:
            break
        if knobs.problem(settings) is None:
            found.setdefault(knobs.effective(settings), settings)
    return [
        Candidate(config_of(each), "shortlist" if each else "default", predictions.of(each)) for each in found.values()
    ]


class _Predictions:
    """Asks for each config once: a prediction simulates the whole workload."""

    def __init__(self, forecast: Forecast | None) -> None:
        self._forecast = forecast
        self._found: dict[str, Predicted | None] = {}

    def of(self, settings: Mapping[str, Any]) -> Predicted | None:
        if self._forecast is None:
            return None
        key = repr(sorted(settings.items()))
        if key not in self._found:
            self._found[key] = self._forecast(settings)
        return self._found[key]


def _always(knobs: Knobs) -> Iterator[dict[str, Any]]:
    for settings in ALWAYS:
        if all(name in knobs.by_name and value in knobs.by_name[name].values for name, value in settings.items()):
            yield dict(settings)


def _combined(knobs: Knobs, predictions: _Predictions, max_configs: int) -> list[dict[str, Any]]:
    """The best combinations of the limits of a step, each of which changes more than one."""
    limits = [knobs.by_name[name] for name in LIMITS if name in knobs.by_name]
    if len(limits) < len(LIMITS):
        return []
    configs = [
        {knob.name: value for knob, value in zip(limits, values, strict=True)}
        for values in itertools.product(*(knob.values for knob in limits))
    ]
    configs = [each for each in configs if knobs.problem(each) is None]
    number = min(MAX_COMBINED, max_configs // 4)
    predicted = [(each, found.value) for each in configs if (found := predictions.of(each)) is not None]
    if not predicted:
        return configs[: min(1, number)]  # the first of a ladder: twice the default of both
    predicted.sort(key=lambda each: -each[1])
    return [each for each, _ in predicted[:number]]


def _single(knobs: Knobs) -> Iterator[dict[str, Any]]:
    """One knob changed: the first value of each knob, then the second of each, and so on."""
    columns: Sequence[Sequence[dict[str, Any]]] = [[{knob.name: value} for value in knob.values] for knob in knobs.all]
    for row in itertools.zip_longest(*columns):
        yield from (settings for settings in row if settings is not None)
