"""An offline record as a report: rounds of one workload through an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from headrace.bench.report.bars import Bar, bar_chart
from headrace.bench.report.document import Chart, Facts, Part, Report, Section, Table
from headrace.bench.report.run_facts import facts_table, run_section, subtitle_of, telemetry_of, title_of
from headrace.bench.report.scales import Axis
from headrace.bench.values import (
    NOT_AVAILABLE,
    found,
    is_number,
    number,
    percent,
    seconds,
)

RATES = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "requests_per_s": "requests/s",
}
Round = Mapping[str, Any]


def offline_report(record: Mapping[str, Any]) -> Report:
    rounds: list[Round] = list(record.get("rounds") or [])
    return Report(
        title_of(record, "Offline benchmark"),
        subtitle_of(record),
        headline=_headline(rounds),
        warnings=[str(warning) for warning in record.get("warnings") or []],
        tiles=_tiles(record, rounds),
        sections=[_rounds(rounds), _resources(rounds), run_section(record)],
    )


def values_of(rounds: Sequence[Round], name: str) -> list[float]:
    return [float(each[name]) for each in rounds if is_number(each.get(name))]


def _headline(rounds: Sequence[Round]) -> str:
    rates = values_of(rounds, "output_tokens_per_s")
    if not rates:
        return "No round has figures."
    if len(rates) == 1:
        return f"{number(rates[0])} output tokens/s in one round; its noise is not known."
    spread = (max(rates) - min(rates)) / median(rates)
    middle = f"Median {number(median(rates))} output tokens/s of {len(rates)} rounds, best {number(max(rates))}"
    return f"{middle}; they differ by {percent(spread)}."


def _tiles(record: Mapping[str, Any], rounds: Sequence[Round]) -> list[tuple[str, str]]:
    tiles = []
    for name, label in RATES.items():
        rates = values_of(rounds, name)
        tiles.append((f"{label}, median", number(median(rates)) if rates else NOT_AVAILABLE))
    times = values_of(rounds, "seconds")
    tiles.append(("time of the median round", seconds(median(times)) if times else NOT_AVAILABLE))
    return [*tiles, ("start-up", seconds(found(record, "engine", "start_s")))]


def _rounds(rounds: Sequence[Round]) -> Section:
    title = "Output tokens/s of each round"
    bars = [
        Bar(f"round {place}", rate if is_number(rate) else None, number(rate))
        for place, each in enumerate(rounds, 1)
        for rate in [each.get("output_tokens_per_s")]
    ]
    rows = [
        [f"round {place}", seconds(each.get("seconds")), *(number(each.get(name)) for name in RATES)]
        for place, each in enumerate(rounds, 1)
    ]
    chart = Chart(title, bar_chart(bars, Axis("output tokens/s"), title=title))
    return Section("Rounds", [*([chart] if bars else []), Table(["", "time", *RATES.values()], rows)])


def _resources(rounds: Sequence[Round]) -> Section:
    labels = [f"round {place}" for place in range(1, len(rounds) + 1)]
    parts: list[Part] = []
    for key, title in (("counters", "Counters of the engine"), ("telemetry", "Telemetry")):
        table = facts_table(title, labels, [telemetry_of(each.get(key)) for each in rounds])
        parts.append(table if table is not None else Facts([(title, NOT_AVAILABLE)]))
    return Section("Engine and hardware", parts)
