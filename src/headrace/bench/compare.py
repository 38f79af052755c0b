"""Compares two records, or two sets of records: ratios with 95 % intervals, and what else differs between them.

Runs are matched by kind, workload and load (of sweeps: the name of the config); engine and settings may differ. Where
both sides have several rounds, the interval is over rounds, paired if they were interleaved. Latency percentiles of one
run each get an interval over their request rows: it says nothing of how much two runs of the same engine differ. A
single round has no interval.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.bench.levels import figures_of, levels_of, load_label, rows_of, steady_rows
from headrace.bench.outcomes import Outcome, answered
from headrace.bench.record import RecordError, read_records
from headrace.bench.statistics import (
    Interval,
    ratio_of_percentiles,
    ratio_of_rounds,
    ratio_of_shares,
    ratios_of_pooled,
)
from headrace.bench.values import found, is_number, plain
from headrace.errors import ConfigError

Verdict = Literal["better", "worse", "no difference shown", "no interval: one round", "not available"]
COMPARED_PERCENTILES = (50, 95, 99)
LENGTHS = ("num_requests", "seconds", "seed")  # of a load
NO_ROWS = "one round each, no request rows"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run. `percent` is set for a percentile of a latency."""

    name: str
    label: str
    is_higher_better: bool = True
    unit: str = ""
    latency: str | None = None  # ttft, tpot, itl, e2e
    percent: int | None = None


FIGURES = (
    Figure("output_tokens_per_s", "output tokens/s"),
    Figure("total_tokens_per_s", "total tokens/s"),
    Figure("requests_per_s", "requests/s"),
    Figure("success_share", "share answered"),
    Figure("goodput_requests_per_s", "goodput, requests/s"),
    *(
        Figure(f"{name}_p{percent}", f"{name.upper()} p{percent}", False, "ms", name, percent)
        for name in ("ttft", "tpot", "itl", "e2e")
        for percent in COMPARED_PERCENTILES
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one workload under one load: a level of an online record, or a round of an offline one."""

    record: Mapping[str, Any]
    level: Mapping[str, Any] | None
    whole: Mapping[str, Any]  # summary of the whole run
    steady: Mapping[str, Any] | None  # summary of the steady window
    rows: list[Outcome] | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both sides. `ratio` is after to before."""

    name: str
    label: str
    is_higher_better: bool
    unit: str
    before: float | None
    after: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    basis: str  # what the interval is over

    @property
    def loss(self) -> float:
        """By which share the second side is worse; negative if it is better."""
        if self.ratio is None:
            return 0.0
        return 1 - self.ratio if self.is_higher_better else self.ratio - 1


@dataclass(frozen=True, slots=True)
class Match:
    """The same workload under the same load, on both sides."""

    label: str
    num_before: int
    num_after: int
    uses_steady: bool
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class FactDifference:
    """A fact other than a figure that differs: machine, versions, model, settings, workload."""

    group: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    before: str
    after: str
    matches: list[Match]
    only_before: list[str]
    only_after: list[str]
    facts: list[FactDifference]
    warnings: list[str] = field(default_factory=list)

    def failures(self, limit: float) -> list[str]:
        """What is worse by more than this share, one line each; for `--fail-if-worse`.

        A figure fails if a difference is shown and the estimate is beyond the limit. Without an interval the estimate
        alone decides. A load that only the first side has fails too: an engine that dies must not pass.
        """
        lines = [f"{label}: measured in {self.before} only" for label in self.only_before]
        for match in self.matches:
            for each in match.differences:
                if each.before is not None and each.after is None:
                    lines.append(f"{match.label}: {each.label} is not available in {self.after}")
                elif each.loss > limit and each.verdict in ("worse", "no interval: one round"):
                    noise = "" if each.interval else " (one round: noise is not known)"
                    lines.append(f"{match.label}: {each.label} is {100 * each.loss:.1f} % worse{noise}")
        return lines


def parse_limit(text: str) -> float:
    """`5%` or `0.05` as a share."""
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"--fail-if-worse must be a share such as 5% or 0.05, got {text!r}")
    return value


def compare_paths(before: Path, after: Path) -> Comparison:
    """Compare the records of two files or directories."""
    return compare(read_side(before), read_side(after), names=(str(before), str(after)))


def read_side(path: Path) -> list[tuple[dict[str, Any], Path]]:
    """Records with the directory that holds their request rows."""
    if not path.exists():
        raise RecordError(f"{path} does not exist")
    if not path.is_dir():
        return [(record, path.parent) for record in read_records([path])]
    return [(record, path) for record in read_records([path])]


Side = Sequence[tuple[Mapping[str, Any], Path | None]]
Key = tuple[str, str, str]  # kind, workload hash, load
Pooled = dict[int, Interval | None]


def compare(before: Side, after: Side, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two sets of records, each with the directory of its rows."""
    sides = [_runs(side, name) for side, name in zip((before, after), names, strict=True)]
    renamed, warnings = _match_workloads(*sides)
    first = {renamed.get(key, key): runs for key, runs in sides[0].items()}
    second = sides[1]
    common = [key for key in first if key in second]
    if not common:
        raise RecordError(
            f"{names[0]} and {names[1]} have no workload and load in common: "
            f"{', '.join(_label(runs[0]) for runs in first.values()) or 'nothing'} against "
            f"{', '.join(_label(runs[0]) for runs in second.values()) or 'nothing'}"
        )
    matches = [_match(first[key], second[key]) for key in common]
    facts = list(
        _fact_differences([run for key in common for run in first[key]], [r for k in common for r in second[k]])
    )
    warnings += [
        f"different {each.group}: {each.name} is {each.before} in {names[0]}, {each.after} in {names[1]}"
        for each in facts
    ]
    warnings += _unanswered([first[key] for key in common], names[0])
    warnings += _unanswered([second[key] for key in common], names[1])
    return Comparison(
        *names,
        matches=matches,
        only_before=[_label(runs[0]) for key, runs in first.items() if key not in second],
        only_after=[_label(runs[0]) for key, runs in second.items() if key not in first],
        facts=facts,
        warnings=warnings,
    )


def _runs(side: Side, name: str) -> dict[Key, list[Run]]:
    """The runs of one side by what was measured. Runs under one key are rounds of the same thing."""
    runs: dict[Key, list[Run]] = {}
    for record, directory in side:
        for load, run in _runs_of(record, directory):
            key = (str(record.get("kind")), str(found(record, "workload", "hash")), load)
            runs.setdefault(key, []).append(run)
    for found_runs in runs.values():
        kinds = {_identity(run.record) for run in found_runs}
        if len(kinds) > 1:
            raise RecordError(
                f"{name} has records of {len(kinds)} different engines, models or settings for "
                f"{_label(found_runs[0])}; they are no rounds of the same thing: compare their files one by one"
            )
    return runs


def _runs_of(record: Mapping[str, Any], directory: Path | None) -> Iterator[tuple[str, Run]]:
    if record.get("kind") == "sweep":
        for row in record.get("configs") or []:
            for figures in row["rounds"] if row["status"] == "ok" else ():
                run = Run(record, {"load": {"name": row["name"]}}, flat_figures(figures), None, None)
                yield f"config {row['name']}", run
        return
    if record.get("rounds"):
        load = _load_key(record.get("load"))
        for each in record["rounds"]:
            yield load, Run(record, None, flat_figures(each), None, None)
        return
    for level, rows in zip(levels_of(record), rows_of(record, directory), strict=True):
        steady = found(level, "steady", "summary")
        run = Run(
            record, level, flat_figures(level.get("summary") or {}), flat_figures(steady) if steady else None, rows
        )
        yield _load_key(level.get("load")), run


def _load_key(load: Any) -> str:
    """What makes two loads the same. How long they were kept up does not: it is a fact that may differ."""
    kept = load
    if isinstance(load, Mapping):
        kept = {name: value for name, value in load.items() if name not in LENGTHS}
    return json.dumps(kept, sort_keys=True)


def flat_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The compared figures of a summary that are there."""
    values = {name: value for name, value in summary.items() if is_number(value)}
    if values.get("num_requests"):
        values["success_share"] = values.get("num_ok", 0) / values["num_requests"]
    if is_number(found(summary, "slo", "goodput_requests_per_s")):
        values["goodput_requests_per_s"] = summary["slo"]["goodput_requests_per_s"]
    for figure in FIGURES:
        if figure.latency is not None and is_number(found(summary, f"{figure.latency}_ms", f"p{figure.percent}")):
            values[figure.name] = summary[f"{figure.latency}_ms"][f"p{figure.percent}"]
    return values


def _identity(record: Mapping[str, Any]) -> str:
    """Engine, model and settings: equal for rounds of the same thing."""
    settings = {name: found(each, "value") for name, each in (found(record, "engine", "settings") or {}).items()}
    model = found(record, "model", "digest") or found(record, "model", "name")
    return json.dumps([found(record, "engine", "name"), model, settings], sort_keys=True, default=str)


def _label(run: Run) -> str:
    workload = found(run.record, "workload", "name") or "workload"
    load = run.record.get("load") if run.level is None else run.level.get("load")
    return f"{workload}, {load_label(load)}" if load else f"{workload}, {run.record.get('kind')}"


def _match_workloads(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> tuple[dict[Key, Key], list[str]]:
    """If each side has one workload and they differ, they are compared all the same, and it is said."""
    hashes = [{key[1] for key in side} for side in (before, after)]
    if hashes[0] == hashes[1] or len(hashes[0]) != 1 or len(hashes[1]) != 1:
        return {}, []
    (new,) = hashes[1]
    warning = "the workloads differ: a ratio shows the workload's effect too, and no fair comparison of engines"
    return {key: (key[0], new, key[2]) for key in before}, [warning]


def _match(before: list[Run], after: list[Run]) -> Match:
    uses_steady = all(run.steady is not None for run in (*before, *after))
    is_paired = _is_interleaved(before, after)
    pooled: Pooled = {}
    found_here = [
        _difference(figure, before, after, pooled, uses_steady=uses_steady, is_paired=is_paired) for figure in FIGURES
    ]
    differences = [difference for difference in found_here if difference is not None]
    return Match(_label(before[0]), len(before), len(after), uses_steady, differences)


def _is_interleaved(before: list[Run], after: list[Run]) -> bool:
    """Whether rounds alternate in time, as A B B A or A B A B: then neighbours saw the same machine."""
    if len(before) != len(after):
        return False
    starts = [
        (str(run.record.get("started_at")), str(run.record.get("id")), side)
        for side, runs in ((0, before), (1, after))
        for run in runs
    ]
    if len({start[:2] for start in starts}) != len(starts):  # several rounds of one record
        return False
    order = [side for *_, side in sorted(starts)]
    return all({order[i], order[i + 1]} == {0, 1} for i in range(0, len(order), 2))


def _difference(
    figure: Figure, before: list[Run], after: list[Run], pooled: Pooled, *, uses_steady: bool, is_paired: bool
) -> Difference | None:
    sides = [_values(figure, runs, uses_steady=uses_steady, is_paired=is_paired) for runs in (before, after)]
    if not sides[0] and not sides[1]:
        return None
    mean_before, mean_after = (sum(values) / len(values) if values else None for values in sides)
    ratio = mean_after / mean_before if mean_before and mean_after is not None else None
    interval: Interval | None = None
    basis = NO_ROWS if figure.percent is not None else "one round each"
    if min(map(len, sides)) >= 2:
        interval = ratio_of_rounds(sides[0], sides[1], is_paired=is_paired)
        kind = "paired" if is_paired else "not paired"
        basis = f"{len(sides[0])} and {len(sides[1])} rounds, {kind}"
    elif sides[0] and sides[1]:
        over_requests = _over_requests(figure, before, after, pooled, uses_steady=uses_steady)
        if over_requests is not None:
            interval, basis = over_requests
    if interval is not None:
        ratio = interval.value
    return Difference(
        figure.name,
        figure.label,
        figure.is_higher_better,
        figure.unit,
        mean_before,
        mean_after,
        ratio,
        None if interval is None else (interval.low, interval.high),
        _verdict(figure, ratio, interval),
        basis,
    )


def _verdict(figure: Figure, ratio: float | None, interval: Interval | None) -> Verdict:
    if ratio is None:
        return "not available"
    if ratio == 0:  # nothing was answered
        return "worse" if figure.is_higher_better else "better"
    if interval is None:
        return "no interval: one round"
    if interval.holds(1.0):
        return "no difference shown"
    return "better" if (interval.value > 1) == figure.is_higher_better else "worse"


def _values(figure: Figure, runs: list[Run], *, uses_steady: bool, is_paired: bool) -> list[float]:
    ordered = sorted(runs, key=lambda run: str(run.record.get("started_at"))) if is_paired else runs
    summaries = [run.steady if uses_steady and run.steady is not None else run.whole for run in ordered]
    if figure.name == "success_share":  # refused requests count, whenever they came
        summaries = [run.whole for run in ordered]
    return [float(summary[figure.name]) for summary in summaries if is_number(summary.get(figure.name))]


def _over_requests(
    figure: Figure, before: list[Run], after: list[Run], pooled: Pooled, *, uses_steady: bool
) -> tuple[Interval | None, str] | None:
    """An interval over requests, for what is a statistic of single requests. None for rates.

    `pooled` keeps the ratios of inter-token latencies, which are computed together.
    """
    if figure.name == "success_share":
        counts = [
            (sum(_count(run, "num_ok") for run in runs), sum(_count(run, "num_requests") for run in runs))
            for runs in (before, after)
        ]
        return ratio_of_shares(*counts), f"{counts[0][1]:,} and {counts[1][1]:,} requests"
    if figure.latency is None or figure.percent is None:
        return None
    rows = [_rows(runs, uses_steady=uses_steady) for runs in (before, after)]
    if rows[0] is None or rows[1] is None:
        return None
    basis = f"{len(rows[0]):,} and {len(rows[1]):,} requests of one run each"
    if figure.latency == "itl":
        if not pooled:
            gaps_before, gaps_after = ([row.itl_s for row in side] for side in (rows[0], rows[1]))
            found_ratios = ratios_of_pooled(gaps_before, gaps_after, COMPARED_PERCENTILES)
            pooled.update(zip(COMPARED_PERCENTILES, found_ratios, strict=True))
        return pooled[figure.percent], basis
    values_before, values_after = (_latencies(side, figure.latency) for side in (rows[0], rows[1]))
    return ratio_of_percentiles(values_before, values_after, figure.percent), basis


def _latencies(rows: Sequence[Outcome], name: str) -> list[float]:
    return [value for row in rows if (value := getattr(row, f"{name}_s")) is not None]


def _count(run: Run, name: str) -> int:
    return int(run.whole.get(name, 0))


def _rows(runs: list[Run], *, uses_steady: bool) -> list[Outcome] | None:
    if any(run.rows is None or run.level is None for run in runs):
        return None
    kept: list[Outcome] = []
    for run in runs:
        assert run.rows is not None and run.level is not None
        kept += answered(steady_rows(run.level, run.rows) if uses_steady else run.rows)
    return kept


def _unanswered(keyed: list[list[Run]], name: str) -> list[str]:
    """A side that refuses looks fast."""
    warnings = []
    for runs in keyed:
        total = sum(_count(run, "num_requests") for run in runs)
        lost = total - sum(_count(run, "num_ok") for run in runs)
        if lost > 0:
            warnings.append(
                f"{name} did not answer {lost:,} of {total:,} requests of {_label(runs[0])}; "
                "its rates and latencies are of the answered ones"
            )
    return warnings


def _fact_differences(before: list[Run], after: list[Run]) -> Iterator[FactDifference]:
    sides = [_facts(runs) for runs in (before, after)]
    for group, name in dict.fromkeys((*sides[0], *sides[1])):
        values = [" or ".join(sorted(side.get((group, name), {"not available"}))) for side in sides]
        if values[0] != values[1]:
            yield FactDifference(group, name, *values)


def _facts(runs: list[Run]) -> dict[tuple[str, str], set[str]]:
    """What should be equal on both sides, with all values that a side has."""
    facts: dict[tuple[str, str], set[str]] = {}
    for record in {id(run.record): run.record for run in runs}.values():
        for group, values in _facts_of(record):
            for name, value in values.items():
                facts.setdefault((group, name), set()).add(plain(value))
    return facts


def _facts_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    machine = record.get("machine") or {}
    gpus = [gpu for gpu in machine.get("gpus") or [] if isinstance(gpu, Mapping)]
    yield (
        "machine",
        {
            **{name: machine.get(name) for name in ("cpu", "num_cores", "memory_bytes", "platform")},
            "gpus": [f"{gpu.get('name')}, driver {gpu.get('driver_version')}" for gpu in gpus],
        },
    )
    yield "version", {**(record.get("versions") or {}), "commit": record.get("commit")}
    engine = record.get("engine") or {}
    yield "engine", {"name": engine.get("name"), **(engine.get("versions") or {})}
    yield "model", {name: found(record, "model", name) for name in ("name", "digest")}
    yield "setting", {name: found(each, "value") for name, each in (engine.get("settings") or {}).items()}
    workload = record.get("workload") or {}
    yield "workload", {name: value for name, value in workload.items() if not isinstance(value, (dict, list))}
    for level in levels_of(record):
        load = level.get("load")
        if isinstance(load, Mapping):
            yield "load", {f"{name} at {load_label(load)}": load[name] for name in LENGTHS if name in load}
    slo = next((text for level in levels_of(record) if (text := found(figures_of(level), "slo", "text"))), None)
    yield "objective", {"slo": slo}
