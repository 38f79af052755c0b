"""The result of a sweep: one row for each config, the best first, failures last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

from headrace.bench.compare import FIGURES, flat_figures
from headrace.bench.levels import figures_of, levels_of, load_amount, load_label
from headrace.bench.statistics import mean_interval, ratio_of_rounds
from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.values import found, is_number
from headrace.errors import ConfigError, nearest

Status = Literal["ok", "failed", "not run"]
RANKABLE = {figure.name: figure for figure in FIGURES}
DEFAULT_RANK = "output_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a config has no rank. `stage` is where it failed: start, settings, answer, measurement."""

    stage: str
    kind: str
    message: str
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of a config that ended well."""

    record: Mapping[str, Any]
    launch_command: str | None = None
    start_s: float | None = None
    not_reported: Sequence[str] = ()
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One config. `ratio` is to the best config, with its interval; `is_tied` if no difference to the best is shown."""

    name: str
    settings: Mapping[str, Any]
    hash: str
    status: Status
    rank: int | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    is_tied: bool = False
    level: str | None = None  # the load under which the value was seen
    rounds: Sequence[Mapping[str, float]] = ()
    counters: Sequence[Mapping[str, float]] = ()  # of the engine in each round; empty if it has none
    num_reused: int = 0
    start_s: float | None = None
    launch_command: str | None = None
    in_force: Mapping[str, Any] = field(default_factory=dict)  # every setting that the engine reports, with its source
    not_reported: Sequence[str] = ()
    warnings: Sequence[str] = ()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SweepResult:
    rows: list[SweepRow]
    rank_by: str
    num_rounds: int
    is_interleaved: bool
    stopped: str | None = None  # why it ended early, and how to go on
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the record: engine, workload, machine

    @property
    def best(self) -> SweepRow | None:
        return self.rows[0] if self.rows and self.rows[0].rank == 1 else None

    def as_record(self) -> dict[str, Any]:
        best = self.best
        return {
            **self.facts,
            "rank_by": self.rank_by,
            "num_rounds": self.num_rounds,
            "is_interleaved": self.is_interleaved,
            "stopped": self.stopped,
            "best": None if best is None else {"name": best.name, "launch_command": best.launch_command},
            "configs": [asdict(row) for row in self.rows],
        }


def check_rank(name: str) -> None:
    if name not in RANKABLE:
        raise ConfigError(f"--rank-by: unknown figure {name!r}{nearest(name, RANKABLE)} (known: {', '.join(RANKABLE)})")


def round_figures(record: Mapping[str, Any], rank_by: str) -> tuple[dict[str, float], str | None]:
    """The figures of one measurement, and under which load.

    Of a curve over levels, a rate is taken where it is highest, and a latency under the highest load.
    """
    if record.get("rounds"):
        rounds = [flat_figures(each) for each in record["rounds"]]
        names = dict.fromkeys(name for each in rounds for name in each)
        return {name: float(median(each[name] for each in rounds if name in each)) for name in names}, None
    level = _chosen_level(record, rank_by)
    return ({}, None) if level is None else (flat_figures(figures_of(level)), load_label(level.get("load")))


def round_counters(record: Mapping[str, Any], rank_by: str) -> dict[str, float]:
    """The engine's counters of the same measurement."""
    rounds = record.get("rounds")
    chosen = rounds[len(rounds) // 2] if rounds else _chosen_level(record, rank_by)
    counters = (chosen or {}).get("counters") or {}
    return {name: float(value) for name, value in counters.items() if is_number(value)}


def _chosen_level(record: Mapping[str, Any], rank_by: str) -> Mapping[str, Any] | None:
    levels = [(flat_figures(figures_of(level)), level) for level in levels_of(record)]
    levels = [(figures, level) for figures, level in levels if rank_by in figures]
    if not levels:
        return None
    if RANKABLE[rank_by].is_higher_better:
        return max(levels, key=lambda each: each[0][rank_by])[1]
    return max(levels, key=lambda each: load_amount(each[1].get("load")) or 0.0)[1]


def ranked(
    configs: Sequence[SweepConfig],
    measured: Mapping[str, Sequence[Measured]],
    failures: Mapping[str, Failure],
    *,
    rank_by: str,
    is_interleaved: bool,
) -> list[SweepRow]:
    """Rows in order: ranked ones, then those without the figure, then failures, then what was not run."""
    rows = [_row(config, measured.get(config.hash, ()), failures.get(config.hash), rank_by) for config in configs]
    figure = RANKABLE[rank_by]
    good = [row for row in rows if row.status == "ok" and row.value is not None]
    good.sort(key=lambda row: row.value or 0.0, reverse=figure.is_higher_better)
    placed = [_placed(row, place, good[0], rank_by, is_interleaved) for place, row in enumerate(good, 1)]
    order: tuple[Status, ...] = ("ok", "failed", "not run")
    rest = [row for row in rows if row.status != "ok" or row.value is None]
    return placed + sorted(rest, key=lambda row: order.index(row.status))


def _row(config: SweepConfig, rounds: Sequence[Measured], failure: Failure | None, rank_by: str) -> SweepRow:
    measured = [round_figures(each.record, rank_by) for each in rounds]
    values = [figures[rank_by] for figures, _ in measured if rank_by in figures]
    interval = mean_interval(values)
    last = rounds[-1] if rounds else None
    warnings = dict.fromkeys(str(text) for each in rounds for text in _warnings(each.record))
    return SweepRow(
        name=config.name,
        settings=config.settings,
        hash=config.hash,
        status="failed" if failure else "ok" if rounds else "not run",
        value=sum(values) / len(values) if values else None,
        interval=(interval.low, interval.high) if interval else None,
        level=next((level for _, level in measured if level), None),
        rounds=[figures for figures, _ in measured],
        counters=[round_counters(each.record, rank_by) for each in rounds],
        num_reused=sum(each.is_reused for each in rounds),
        start_s=median(starts) if (starts := [each.start_s for each in rounds if each.start_s is not None]) else None,
        launch_command=last.launch_command if last else None,
        in_force=found(last.record, "engine", "settings") or {} if last else {},
        not_reported=last.not_reported if last else (),
        warnings=list(warnings),
        failure=failure,
    )


def _placed(row: SweepRow, place: int, best: SweepRow, rank_by: str, is_interleaved: bool) -> SweepRow:
    sides = [[figures[rank_by] for figures in each.rounds if rank_by in figures] for each in (best, row)]
    interval = ratio_of_rounds(sides[0], sides[1], is_paired=is_interleaved)
    return replace(
        row,
        rank=place,
        ratio=row.value / best.value if best.value and row.value is not None else None,
        ratio_interval=(interval.low, interval.high) if interval else None,
        is_tied=interval is not None and interval.holds(1.0),
    )


def _warnings(record: Mapping[str, Any]) -> list[Any]:
    own = list(record.get("warnings") or [])
    return own + [
        f"{load_label(level.get('load'))}: {text}"
        for level in record.get("levels") or []
        for text in level.get("warnings") or []
    ]
