"""A tune as a report: the decision with its interval, the settings as a command and a file, and what they rest on."""

from __future__ import annotations

from statistics import fmean

from headrace.bench.report.document import Cell, Code, Details, Note, Part, Report, Section, Table
from headrace.bench.report.run_facts import run_section, subtitle_of, title_of
from headrace.bench.values import NOT_AVAILABLE, found, is_number, number, percent, plain, seconds, times
from headrace.tune.ratios import chosen_of, default_of, mean_ratio, rows_of, values_of
from headrace.tune.report_finalists import finalists_section
from headrace.tune.report_search import effects_section, failures_section, predictions_section, race_section
from headrace.tune.report_speeds import latencies_section, trade_off_section
from headrace.tune.report_words import Missing, Record, counted, figure_of, own_settings

NOTHING_DECIDED = "nothing was decided"
MAX_TITLE = 64  # of a config's name in a title
STATUSES = ("ok", "failed", "ruled out", "not run")


def tune_report(record: Record) -> Report:
    """The report of a record of kind `tune`."""
    missing: Missing = []
    sections = [
        _result(record),
        finalists_section(record, missing),
        race_section(record, missing),
        effects_section(record, missing),
        failures_section(record),
        predictions_section(record, missing),
        trade_off_section(record, missing),
        latencies_section(record, missing),
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


def _warnings(record: Record) -> list[str]:
    warnings = [f"the search ended early: {record['stopped']}"] if record.get("stopped") else []
    if found(record, "decision", "verdict") == "not confirmed":
        warnings.append("nothing was confirmed: the choice rests on the race, whose rounds are few")
    return list(dict.fromkeys([*warnings, *map(str, record.get("warnings") or [])]))


def _tiles(record: Record) -> list[tuple[str, str]]:
    label, unit = figure_of(record)
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
    own = own_settings(rows)
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
    return Section("Configs", [Note(f"{counted(len(rows), 'config')}: {shown}."), Details("All configs", [table])])


def _run(record: Record) -> Section:
    engine = {**(record.get("engine") or {}), "settings": record.get("settings_in_force") or {}}
    section = run_section({**record, "engine": engine})
    common = {name: value for name, value in (record.get("common_settings") or {}).items() if name != "model"}
    if not common:
        return section
    given = ", ".join(f"{name} = {plain(value)}" for name, value in common.items())
    return Section(section.title, [Note(f"Held fixed in all configs: {given}."), *section.parts])
