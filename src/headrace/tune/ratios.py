"""Reads a record of a tune: ratios to the default of the same round, the effect of each knob, the prediction's error.

Values of different rounds are never divided: a machine that gets slower over time slows both sides of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from headrace.bench.statistics import Interval, mean_interval, ratio_of_rounds
from headrace.bench.values import found, is_number

Row = Mapping[str, Any]  # of record["configs"]
Trial = Mapping[str, Any]
MIN_RANKED = 3  # configs for a rank correlation


@dataclass(frozen=True, slots=True)
class Effect:
    """What one value of a knob did. `alone`: the config that changes nothing else was measured, and is `ratio`."""

    knob: str
    value: Any
    ratio: float
    low: float
    high: float
    num_configs: int
    is_alone: bool
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted and a measured value of one config."""

    name: str
    predicted: float
    low: float | None
    high: float | None
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    return list(record.get("configs") or [])


def default_of(record: Mapping[str, Any]) -> Row | None:
    return next((row for row in rows_of(record) if row.get("is_default")), None)


def chosen_of(record: Mapping[str, Any]) -> Row | None:
    name = found(record, "decision", "chosen")
    return next((row for row in rows_of(record) if row.get("name") == name), None)


def finalists_of(record: Mapping[str, Any]) -> list[Row]:
    """The default first, then the finalists by their score."""
    others = [row for row in rows_of(record) if row.get("is_finalist") and not row.get("is_default")]
    default = default_of(record)
    return ([] if default is None else [default]) + sorted(others, key=lambda row: -(row.get("score") or 0.0))


def trials_of(row: Row, *phases: str) -> list[Trial]:
    """Trials with a value, of these phases; of the race and the confirmation if none is named."""
    wanted = phases or ("race", "confirm")
    return [
        trial for trial in row.get("trials") or [] if trial.get("phase") in wanted and is_number(trial.get("value"))
    ]


def values_of(row: Row, *phases: str) -> list[float]:
    return [float(trial["value"]) for trial in trials_of(row, *phases)]


def paired(row: Row, against: Row, phase: str) -> tuple[list[float], list[float]]:
    """Values of both configs in the rounds that both have: those of `against`, then those of `row`."""
    sides = [{_round_of(trial): float(trial["value"]) for trial in trials_of(each, phase)} for each in (against, row)]
    common = [key for key in sides[0] if key in sides[1]]
    return [sides[0][key] for key in common], [sides[1][key] for key in common]


def confirmed_ratio(record: Mapping[str, Any], row: Row, default: Row) -> Interval | None:
    """The ratio to the default over the rounds of the confirmation, with its interval: the decision's own for what was
    chosen. None with fewer than two rounds."""
    made = record.get("decision") or {}
    if row.get("name") == made.get("chosen") and all(is_number(made.get(key)) for key in ("ratio", "low", "high")):
        return Interval(float(made["ratio"]), float(made["low"]), float(made["high"]))
    return ratio_of_rounds(*paired(row, default, "confirm"), is_paired=True)


def confirmed_value(row: Row) -> Interval | None:
    return mean_interval(values_of(row, "confirm"))


def ratios_by_rung(row: Row, default: Row) -> dict[int, float]:
    """The mean ratio to the default in each rung of the race."""
    of_default = {_round_of(trial): float(trial["value"]) for trial in trials_of(default, "race")}
    by_rung: dict[int, list[float]] = {}
    for trial in trials_of(row, "race"):
        base = of_default.get(_round_of(trial))
        if base:
            by_rung.setdefault(int(trial.get("rung") or 0), []).append(float(trial["value"]) / base)
    return {rung: fmean(ratios) for rung, ratios in sorted(by_rung.items())}


def mean_ratio(row: Row, default: Row) -> float | None:
    """Over all rounds of race and confirmation that both have. The record's score where there is none."""
    sides = [paired(row, default, phase) for phase in ("race", "confirm")]
    ratios = [value / base for bases, values in sides for base, value in zip(bases, values, strict=True) if base > 0]
    if ratios:
        return fmean(ratios)
    return float(row["score"]) if is_number(row.get("score")) else None


def effects_of(record: Mapping[str, Any]) -> list[Effect]:
    """The ratio to the default of each value of each knob; the knob with the largest effect first."""
    default = default_of(record)
    if default is None:
        return []
    ratios = [(row, mean_ratio(row, default)) for row in rows_of(record) if not row.get("is_default")]
    known = [(row, ratio) for row, ratio in ratios if ratio is not None]
    by_knob = [_effects_of_knob(knob, known) for knob in record.get("knobs") or []]
    by_knob = [each for each in by_knob if any(not effect.is_default for effect in each)]
    # What a value did together with others says less of its knob.
    by_knob.sort(key=lambda each: -max((abs(effect.ratio - 1) for effect in each if effect.is_alone), default=0.0))
    return [effect for each in by_knob for effect in each]


def value_in(row: Row, knob: Mapping[str, Any]) -> Any:
    """The value of a knob in a config: what it sets, or what the default has in force."""
    return (row.get("settings") or {}).get(knob["name"], knob.get("default"))


def predictions_of(record: Mapping[str, Any]) -> list[Prediction]:
    pairs = []
    for row in rows_of(record):
        values, value = values_of(row), found(row, "predicted", "value")
        if values and is_number(value) and fmean(values) > 0:
            low, high = (found(row, "predicted", key) for key in ("low", "high"))
            has_range = is_number(low) and is_number(high)
            pairs.append(
                Prediction(
                    str(row["name"]),
                    float(value),
                    float(low) if has_range else None,
                    float(high) if has_range else None,
                    fmean(values),
                )
            )
    return pairs


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's: 1 if both orders are equal, -1 if one is the other reversed. None for few or equal values."""
    if len(pairs) < MIN_RANKED:
        return None
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) + 1) / 2
    spread = [sum((rank - mean) ** 2 for rank in ranks) for ranks in (first, second)]
    if not all(spread):
        return None
    product = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    return float(product / (spread[0] * spread[1]) ** 0.5)


def levels_of(row: Row) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Load and figures of each load level that was measured, in all phases."""
    for trial in row.get("trials") or []:
        levels = trial.get("levels")
        if levels is None and trial.get("load"):
            levels = [{"load": trial["load"], "figures": trial.get("figures") or {}}]
        for level in levels or []:
            if isinstance(level.get("load"), Mapping) and isinstance(level.get("figures"), Mapping):
                yield level["load"], level["figures"]


def _effects_of_knob(knob: Mapping[str, Any], known: Sequence[tuple[Row, float]]) -> list[Effect]:
    name = knob["name"]
    having = [(row, ratio) for row, ratio in known if name in (row.get("settings") or {})]
    values: list[Any] = []  # a list, because 1 and True are equal keys and some values cannot be hashed
    for row, _ in having:
        if not any(_is_same(row["settings"][name], value) for value in values):
            values.append(row["settings"][name])
    effects = [_effect(name, value, having) for value in values]
    own = Effect(name, knob.get("default"), 1.0, 1.0, 1.0, 1, is_alone=True, is_default=True)
    if not any(_is_same(effect.value, own.value) for effect in effects):
        effects.append(own)
    return sorted(effects, key=_place_of)


def _effect(name: str, value: Any, having: Sequence[tuple[Row, float]]) -> Effect:
    same = [(row, ratio) for row, ratio in having if _is_same(row["settings"][name], value)]
    alone = [ratio for row, ratio in same if len(row["settings"]) == 1]
    ratios = [ratio for _, ratio in same]
    return Effect(
        name,
        value,
        fmean(alone) if alone else median(ratios),
        min(ratios),
        max(ratios),
        len(same),
        is_alone=bool(alone),
    )


def _place_of(effect: Effect) -> tuple[bool, float, str]:
    is_size = is_number(effect.value)
    return (not is_size, float(effect.value) if is_size else 0.0, str(effect.value))


def _is_same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and bool(first == second)


def _round_of(trial: Trial) -> tuple[Any, Any]:
    return trial.get("rung") if trial.get("phase") == "race" else None, trial.get("round")


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
