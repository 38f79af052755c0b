"""Words that several sections of a tune's report use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.levels import load_label
from headrace.bench.report.sweep import LABELS
from headrace.bench.values import plain
from headrace.tune.ratios import Row, rows_of, trials_of

Record = Mapping[str, Any]
Missing = list[tuple[str, str]]  # what the report lacks, and why


def figure_of(record: Record) -> tuple[str, str]:
    """Label and unit of the figure that decides."""
    name = str(record.get("figure"))
    return (LABELS[name].label, LABELS[name].unit) if name in LABELS else (name, "")


def own_settings(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The settings of each config by its name; nothing if all names say them already."""
    if all(_says_settings(row) for row in rows):
        return {}
    return {str(row["name"]): [_settings_text(row)] for row in rows}


def _settings_text(row: Row) -> str:
    settings = row.get("settings") or {}
    return ", ".join(f"{name} = {plain(value)}" for name, value in settings.items()) or "the engine's own"


def _says_settings(row: Row) -> bool:
    name = _bare(str(row["name"]))
    return all(_bare(f"{key}={value}") in name for key, value in (row.get("settings") or {}).items())


def _bare(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", " \"'"))


def only_one(record: Record) -> str:
    return "there is only one config, so nothing to compare" if len(rows_of(record)) == 1 else ""


def loads_of(row: Row) -> str:
    labels = [load_label(trial["load"]) for trial in trials_of(row, "confirm") if trial.get("load")]
    return ", ".join(dict.fromkeys(labels))


def joined_names(names: Any) -> str:
    return "; ".join(map(str, names or [])) or "none"


def counted(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'s' * (number_of != 1)}"
