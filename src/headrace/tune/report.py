"""A tune as a report: the decision with its interval, the settings as a command and a file, and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from headrace.bench.levels import load_label
from headrace.bench.report.document import Cell, Chart, Code, Details, Note, Part, Report, Section, Table
from headrace.bench.report.run_facts import run_section, subtitle_of, title_of
from headrace.bench.report.sweep import LABELS
from headrace.bench.values import (
    NOT_AVAILABLE,
    found,
    interval,
    is_number,
    number,
    percent,
    plain,
    seconds,
    times,
)
from headrace.tune.charts import (
    LATENCIES,
    PERCENTILES,
    SEQUENCE_SPEED,
    effect_charts,
    failure_charts,
    finalist_charts,
    latency_charts,
    latency_values,
    prediction_charts,
    race_charts,
    ratio_text,
    trade_off_charts,
)
from headrace.tune.ratios import (
    Row,
    chosen_of,
    confirmed_ratio,
    confirmed_value,
    default_of,
    effects_of,
    finalists_of,
    levels_of,
    mean_ratio,
    predictions_of,
    rank_correlation,
    ratios_by_rung,
    rows_of,
    trials_of,
    values_of,
)

Record = Mapping[str, Any]
NOTHING_DECIDED = "nothing was decided"
MAX_TITLE = 64  # of a config's name in a title
STATUSES = ("ok", "failed", "ruled out", "not run")


def tune_report(record: Record) -> Report:
    """The report of a record of kind `tune`."""
    missing: list[tuple[str, str]] = []  # what the report lacks, and why
    sections = [
        _result(record),
        _confirmation(record, missing),
        _race(record, missing),
        _effects(record, missing),
        _failures(record),
        _predictions(record, missing),
        _trade_off(record, missing),
        _latencies(record, missing),
        _quality(record),
        _configs(record),
    ]
    kept = [section for section in sections if section is not None]
    if missing:
        rows = [[what, why] for what, why in missing]
        kept.append(Section("Not in this report", [Table(["part", "why"], rows, num_text_columns=2)]))
    return Report(
        title_of(record, "Tune"),
        subtitle_of(record),
        headline=headline_of(record),
        warnings=_warnings(record),
        tiles=_tiles(record),
        sections=[*kept, _run(record)],
        is_headline_first=True,
    )


def headline_of(record: Record) -> str:
    """The decision in one line, such as `tuned against default: 1.37x [1.33, 1.41]`."""
    text = found(record, "decision", "text")
    if text:
        return str(text)
    return f"{NOTHING_DECIDED}: {record.get('stopped') or 'no config could be measured'}"


def _figure(record: Record) -> tuple[str, str]:
    """Label and unit of the figure that decides."""
    name = str(record.get("figure"))
    return (LABELS[name].label, LABELS[name].unit) if name in LABELS else (name, "")


def _warnings(record: Record) -> list[str]:
    warnings = [f"the search ended early: {record['stopped']}"] if record.get("stopped") else []
    if found(record, "decision", "verdict") == "not confirmed":
        warnings.append("nothing was confirmed: the choice rests on the race, whose rounds are few")
    return list(dict.fromkeys([*warnings, *map(str, record.get("warnings") or [])]))


def _tiles(record: Record) -> list[tuple[str, str]]:
    label, unit = _figure(record)
    rows = rows_of(record)
    chosen, default = chosen_of(record), default_of(record)
    tiles = []
    for row, name in ((chosen, "chosen"), (default, "default")):
        values = [] if row is None else values_of(row, "confirm") or values_of(row)
        if values and not (row is default and name == "chosen"):
            tiles.append((f"{label}, {name}", number(fmean(values), unit)))
    if is_number(found(record, "noise", "floor")):
        tiles.append(("noise floor", f"± {percent(record['noise']['floor'])}"))
    failed = sum(row.get("status") == "failed" for row in rows)
    tiles.append(("configs", f"{len(rows)}" + (f", {failed} failed" if failed else "")))
    spent, budget = record.get("spent_s"), record.get("budget_s")
    limit = f", of {seconds(budget).removesuffix(' 00 s')}" if is_number(budget) else ""
    tiles.append((f"time spent{limit}", seconds(spent)))
    return tiles


def _result(record: Record) -> Section:
    chosen = chosen_of(record)
    parts: list[Part] = [Code(str(record.get("launch_command") or NOT_AVAILABLE), "Launch command")]
    file = record.get("settings_file") or {}
    if file.get("text") is not None:
        kind = {".toml": "TOML", ".yaml": "YAML"}.get(str(file.get("suffix")), str(file.get("suffix")))
        text = str(file["text"]) or "# all settings are the engine's own\n"
        parts.append(Code(text, f"Settings file ({kind})"))
    else:
        parts.append(Note("There is no settings file: " + str(record.get("stopped") or "the record has none") + "."))
    if chosen is None:
        return Section("Result", parts)
    name = str(chosen["name"])
    title = "The chosen settings" + (f": {name}" if len(name) <= MAX_TITLE else "")
    return Section("The default" if chosen.get("is_default") else title, parts)


def _confirmation(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    default = default_of(record)
    rows = [row for row in finalists_of(record) if trials_of(row, "confirm")]
    if default is None or not rows:
        missing.append(("finalists against the default", _alone(record) or "no round of the confirmation was finished"))
        return None
    label, unit = _figure(record)
    loads = list(dict.fromkeys(load for row in rows if (load := _loads(row))))
    has_load = len(loads) > 1
    columns = [label, "95 % interval", "ratio to the default [95 %]", "difference"]
    own = _own_settings(rows)
    cells = [
        [str(row["name"]), *own.get(str(row["name"]), []), *_finalist(record, row, default, unit, has_load=has_load)]
        for row in rows
    ]
    names = ["config", *(["settings"] if own else [])]
    table = Table([*names, *columns, *(["load"] if has_load else []), "rounds"], cells, num_text_columns=len(names))
    parts: list[Part] = [*finalist_charts(record), table, Note(_noise(record))]
    if len(loads) == 1:
        parts.append(Note(f"Load of all rounds: {loads[0]}."))
    return Section("Finalists against the default", parts)


def _finalist(record: Record, row: Row, default: Row, unit: str, *, has_load: bool) -> list[str | Cell]:
    value, values = confirmed_value(row), values_of(row, "confirm")
    ratio = None if row is default else confirmed_ratio(record, row, default)
    is_chosen = row is chosen_of(record)
    if row is default:
        difference: str | Cell = Cell("chosen", "good") if is_chosen else ""
    elif ratio is None:
        difference = Cell("no interval: too few rounds", "unsure")
    elif ratio.holds(1.0) or abs(ratio.value - 1) < _floor(record):
        difference = Cell("no difference shown", "unsure")
    else:
        faster = "better" if ratio.value > 1 else "worse"
        difference = Cell(f"{faster}, chosen" if is_chosen else faster, "good" if ratio.value > 1 else "bad")
    return [
        number(fmean(values), unit),
        NOT_AVAILABLE if value is None else interval(value.low, value.high),
        "1" if row is default else ratio_text(ratio),
        difference,
        *([_loads(row)] if has_load else []),
        str(len(values)),
    ]


def _floor(record: Record) -> float:
    floor = found(record, "noise", "floor")
    return float(floor) if is_number(floor) else 0.0


def _noise(record: Record) -> str:
    noise = record.get("noise") or {}
    if not is_number(noise.get("floor")):
        return "Noise floor: not available, because the default was not measured twice in enough rounds."
    edges = f" [{noise['low']:.3f}, {noise['high']:.3f}]" if is_number(noise.get("low")) else ""
    return (
        f"Noise floor: the default was measured twice in each of {noise.get('num_rounds')} rounds; the ratio of the "
        f"two is {noise['ratio']:.3f}{edges}. A gain below {percent(noise['floor'])} cannot be told from noise: then "
        f"the default is kept.{_drift(noise)}"
    )


def _drift(noise: Mapping[str, Any]) -> str:
    low, high = noise.get("low"), noise.get("high")
    if low is None or high is None or low <= 1 <= high:
        return ""
    return " The interval does not hold 1: something changes within a round, so small gains are doubtful."


def _race(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    default = default_of(record)
    rungs = record.get("rungs") or []
    if default is None or not rungs:
        missing.append(("the race", _alone(record) or "no rung was finished"))
        return None
    keys = ("entered", "kept", "added")
    counts = [
        [plain(rung.get("rung")), plain(rung.get("num_requests")), *(str(len(rung.get(key) or [])) for key in keys)]
        for rung in rungs
    ]
    caption = "The default is measured in every rung, whatever its score. Added: new combinations of the best values"
    table = Table(["rung", "requests", *keys], counts, caption=caption)
    names = [[plain(rung.get("rung")), *(_names(rung.get(key)) for key in keys)] for rung in rungs]
    details = Details("Who entered, was kept and was added", [Table(["rung", *keys], names, num_text_columns=4)])
    return Section("The race", [*race_charts(record), table, *_scores(record, default, rungs), details])


def _scores(record: Record, default: Row, rungs: Sequence[Mapping[str, Any]]) -> list[Part]:
    numbers = [int(rung["rung"]) for rung in rungs if is_number(rung.get("rung"))]
    measured = [(row, ratios_by_rung(row, default)) for row in rows_of(record) if row is not default]
    measured = [(row, ratios) for row, ratios in measured if ratios]
    measured.sort(key=lambda each: (-max(each[1]), -each[1][max(each[1])]))
    cells = [
        [
            str(row["name"]),
            *(times(ratios[rung]) if rung in ratios else "" for rung in numbers),
            times(row.get("score")),
            _outcome(row, ratios, rungs),
        ]
        for row, ratios in measured
    ]
    if not cells:
        return []
    columns = ["config", *(f"rung {rung}" for rung in numbers), "score", "then"]
    return [Table(columns, cells, caption="Ratio to the default of the same round")]


def _outcome(row: Row, ratios: Mapping[int, float], rungs: Sequence[Mapping[str, Any]]) -> str:
    """What became of a config after its last rung."""
    if row.get("is_finalist"):
        return "finalist"
    if row.get("status") == "failed":
        return "failed"
    last = next((rung for rung in rungs if rung.get("rung") == max(ratios)), {})
    return "kept" if row.get("name") in (last.get("kept") or []) else "dropped"


def _effects(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    effects = effects_of(record)
    if not effects:
        why = "no config was measured in the same round as the default"
        missing.append(("effect of each knob", _alone(record) or why))
        return None
    knobs = {knob["name"]: knob for knob in record.get("knobs") or []}
    rows = [
        [
            effect.knob,
            plain(effect.value),
            "default" if effect.is_default else "this knob alone" if effect.is_alone else "with other changes, median",
            "restart" if knobs[effect.knob].get("needs_restart") else "live",
            times(effect.ratio),
            "" if effect.num_configs < 2 else f"{times(effect.low)} to {times(effect.high)}",
            "" if effect.is_default else str(effect.num_configs),
        ]
        for effect in effects
    ]
    columns = ["knob", "value", "measured", "change needs", "ratio to the default", "range over configs", "configs"]
    table = Table(columns, rows, num_text_columns=4)
    unused = [name for name in knobs if name not in {effect.knob for effect in effects}]
    parts: list[Part] = [*effect_charts(record), table]
    if unused:
        parts.append(Note(f"Not measured with another value: {', '.join(unused)}."))
    whys = [[name, plain(knob.get("values")), str(knob.get("why") or "")] for name, knob in knobs.items()]
    parts.append(Details("Why each knob was searched", [Table(["knob", "values", "why"], whys, num_text_columns=3)]))
    return Section("Effect of each knob", parts)


def _failures(record: Record) -> Section | None:
    rows = rows_of(record)
    failed = [row for row in rows if row.get("status") == "failed"]
    ruled_out = [row for row in rows if row.get("status") == "ruled out"]
    if not failed and not ruled_out:
        return None
    charts = failure_charts(record)
    parts: list[Part] = [*charts]
    if failed:
        cells = [_failure(row, ruled_out) for row in failed]
        columns = ["config", "failed at", "class", "message", "ruled out"]
        parts.append(Table(columns, cells, num_text_columns=5))
    if ruled_out:
        cells = [
            [str(row["name"]), str(found(row, "ruled_out_by", "config") or NOT_AVAILABLE), _why(row)]
            for row in ruled_out
        ]
        parts.append(Table(["ruled out", "by the failure of", "why"], cells, num_text_columns=3))
    if not charts:
        parts.append(Note("There is no grid: no knob that grows memory had several values."))
    for row in failed:
        if tail := found(row, "failure", "log_tail"):
            parts.append(Details(f"End of the log: {row['name']}", [Code(str(tail))]))
    return Section("Failures, and what they ruled out", parts)


def _failure(row: Row, ruled_out: Sequence[Row]) -> list[str]:
    names = [str(each["name"]) for each in ruled_out if found(each, "ruled_out_by", "config") == row.get("name")]
    facts = [plain(found(row, "failure", key) or NOT_AVAILABLE) for key in ("stage", "kind", "message")]
    return [str(row["name"]), *facts, "; ".join(names) or "only itself"]


def _why(row: Row) -> str:
    return str(found(row, "ruled_out_by", "why") or NOT_AVAILABLE)


def _predictions(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    pairs = predictions_of(record)
    label, unit = _figure(record)
    if not pairs:
        missing.append(("predicted against measured", "no measured config has a prediction"))
        return None
    rows = [
        [
            each.name,
            number(each.predicted, unit),
            NOT_AVAILABLE if each.low is None else interval(each.low, each.high),
            number(each.measured, unit),
            f"{100 * each.error:+.1f} %",
        ]
        for each in sorted(pairs, key=lambda each: -each.predicted)
    ]
    columns = ["config", f"predicted {label}", "range", "measured", "error"]
    parts: list[Part] = [*prediction_charts(record, label), Table(columns, rows)]
    return Section("Predicted against measured", [*parts, Note(_agreement_of(pairs))])


def _agreement_of(pairs: Sequence[Any]) -> str:
    errors = [abs(each.error) for each in pairs]
    with_range = [each for each in pairs if each.low is not None]
    inside = sum(each.low <= each.measured <= each.high for each in with_range)
    text = f"Median error of the prediction: {percent(median(errors))} over {_count(len(pairs), 'config')}"
    if with_range:
        text += f"; {inside} of {len(with_range)} measured values are within the predicted range"
    rank = rank_correlation([(each.predicted, each.measured) for each in pairs])
    if rank is None:
        return f"{text}. Rank correlation: not available, because fewer than three configs differ."
    words = (
        "the predicted order is nearly the measured one"
        if rank >= 0.8
        else "the predicted order is roughly the measured one"
        if rank >= 0.5
        else "the predicted order says little about the measured one"
        if rank > -0.5
        else "the predicted order is nearly the reverse of the measured one"
    )
    return f"{text}. Rank correlation (Spearman) {rank:.2f}: {words}."


def _trade_off(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    charts: list[Chart] = trade_off_charts(record)
    if charts and record.get("goal") == "batch":
        speeds = Details("Speeds of each config", [_sequence_speeds(record)])
        return Section("Throughput against the speed of one sequence", [*charts, speeds])
    if charts:
        return Section("Throughput against latency", [*charts, _levels(record)])
    why = _alone(record) or (
        f"the record has no speed of one sequence ({SEQUENCE_SPEED}) of several configs"
        if record.get("goal") == "batch"
        else "no load level has both output tokens/s and a latency"
    )
    missing.append(("Pareto curve", why))
    return None


def _sequence_speeds(record: Record) -> Table:
    rows = []
    for row in rows_of(record):
        speeds = [float(t["figures"][SEQUENCE_SPEED]) for t in trials_of(row) if _has(t, SEQUENCE_SPEED)]
        if speeds:
            rows.append([str(row["name"]), number(fmean(values_of(row))), number(fmean(speeds))])
    return Table(["config", "output tokens/s", "of one sequence"], rows)


def _has(trial: Mapping[str, Any], name: str) -> bool:
    return is_number(found(trial, "figures", name))


def _levels(record: Record) -> Details:
    names = ("output_tokens_per_s", "goodput_requests_per_s", "ttft_p95", "tpot_p95")
    rows = []
    for row in rows_of(record):
        by_load: dict[str, list[Mapping[str, Any]]] = {}
        for load, figures in levels_of(row):
            by_load.setdefault(load_label(load), []).append(figures)
        for label, several in by_load.items():
            values = [[float(each[name]) for each in several if is_number(each.get(name))] for name in names]
            means = [
                number(fmean(each), LABELS[name].unit) if each else NOT_AVAILABLE
                for name, each in zip(names, values, strict=True)
            ]
            rows.append([str(row["name"]), label, *means, str(len(several))])
    columns = ["config", "load", *(LABELS[name].label for name in names), "rounds"]
    return Details(f"Load levels ({len(rows)})", [Table(columns, rows, num_text_columns=2)])


def _latencies(record: Record, missing: list[tuple[str, str]]) -> Section | None:
    charts = latency_charts(record)
    if not charts:
        why = "a batch is measured as a whole run" if record.get("goal") == "batch" else "the record has no percentiles"
        missing.append(("latency distributions", why))
        return None
    chosen, default = chosen_of(record), default_of(record)
    rows = [(row, name) for row, name in ((default, "default"), (chosen, "chosen")) if row is not None]
    if chosen is default:
        rows = rows[:1]
    cells = []
    for latency in LATENCIES:
        for row, name in rows:
            values = [latency_values(row, latency, each) for each in PERCENTILES]
            if any(values):
                means = [number(fmean(each), "ms") if each else NOT_AVAILABLE for each in values]
                cells.append([latency.upper(), f"{name}: {row['name']}" if name == "chosen" else name, *means])
    table = Table(["latency", "config", *(f"p{each}" for each in PERCENTILES)], cells, num_text_columns=2)
    same = "" if len({_loads(row) for row, _ in rows}) < 2 else " The two were measured at different loads."
    note = "Percentiles of each round at its best load level; request rows are not kept in the record." + same
    return Section("Latency distributions", [*charts, table, Note(note)])


def _quality(record: Record) -> Section | None:
    entries = record.get("quality") or []
    if not entries:
        knobs = [str(knob["name"]) for knob in record.get("knobs") or [] if knob.get("changes_quality")]
        measured = [row for row in rows_of(record) if row.get("status") == "ok"]
        changing = [name for name in knobs if any(name in (row.get("settings") or {}) for row in measured)]
        if not changing:
            return None
        text = f"{', '.join(changing)} may change answers, and no agreement with the default was measured."
        return Section("Quality", [Note(text)])
    rows = [
        [
            str(each.get("config")),
            percent(each.get("agreement")),
            plain(each.get("num_tokens")),
            plain(each.get("num_prompts")),
        ]
        for each in entries
    ]
    columns = ["config", "agreement with the default", "tokens", "prompts"]
    note = (
        "The share of greedy tokens up to the first difference from the default's answer. A low share means other "
        "answers, not worse ones."
    )
    return Section("Quality", [Table(columns, rows), Note(note)])


def _configs(record: Record) -> Section:
    default = default_of(record)
    rows = rows_of(record)
    if not rows:
        return Section("Configs", [Note("No config was tried.")])
    own = _own_settings(rows)
    cells: list[list[str | Cell]] = []
    for row in rows:
        ratio = None if default is None else mean_ratio(row, default)
        status = str(row.get("status"))
        name = str(row["name"])
        cells.append(
            [
                name,
                *own.get(name, []),
                str(row.get("origin") or ""),
                Cell(status, "bad") if status == "failed" else status,
                times(ratio) if ratio is not None and row is not default else "",
                str(len(row.get("trials") or [])),
            ]
        )
    names = ["config", *(["settings"] if own else []), "origin", "status"]
    table = Table([*names, "ratio to the default", "trials"], cells, num_text_columns=len(names))
    counts = {status: sum(row.get("status") == status for row in rows) for status in STATUSES}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return Section("Configs", [Note(f"{_count(len(rows), 'config')}: {shown}."), Details("All configs", [table])])


def _run(record: Record) -> Section:
    engine = {**(record.get("engine") or {}), "settings": record.get("settings_in_force") or {}}
    section = run_section({**record, "engine": engine})
    common = {name: value for name, value in (record.get("common_settings") or {}).items() if name != "model"}
    if not common:
        return section
    given = ", ".join(f"{name} = {plain(value)}" for name, value in common.items())
    return Section(section.title, [Note(f"Held fixed in all configs: {given}."), *section.parts])


def _settings_text(row: Row) -> str:
    settings = row.get("settings") or {}
    return ", ".join(f"{name} = {plain(value)}" for name, value in settings.items()) or "the engine's own"


def _own_settings(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The settings of each config by its name; nothing if all names say them already."""
    if all(_says_settings(row) for row in rows):
        return {}
    return {str(row["name"]): [_settings_text(row)] for row in rows}


def _says_settings(row: Row) -> bool:
    name = _bare(str(row["name"]))
    return all(_bare(f"{key}={value}") in name for key, value in (row.get("settings") or {}).items())


def _bare(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", " \"'"))


def _alone(record: Record) -> str:
    return "there is only one config, so nothing to compare" if len(rows_of(record)) == 1 else ""


def _loads(row: Row) -> str:
    labels = [load_label(trial["load"]) for trial in trials_of(row, "confirm") if trial.get("load")]
    return ", ".join(dict.fromkeys(labels))


def _names(names: Any) -> str:
    return "; ".join(map(str, names or [])) or "none"


def _count(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'s' * (number_of != 1)}"
