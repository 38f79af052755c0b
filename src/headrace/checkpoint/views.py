"""Checkpoints, their differences and their verification as reports for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench.compare import FactDifference
from headrace.bench.report.document import Cell, Facts, Note, Part, Report, Section, Table, Tone
from headrace.bench.statistics import ratio_of_rounds
from headrace.bench.values import NOT_AVAILABLE, found, interval, memory, number, percent, plain, ratio
from headrace.checkpoint.document import EDITED, Checkpoint
from headrace.checkpoint.facts import ENVIRONMENT, differences
from headrace.checkpoint.judge import BY_NAME, minimum_of, tolerance_of, values_of

if TYPE_CHECKING:
    from headrace.checkpoint.verify import Verification

TONES: dict[str, Tone] = {"holds": "good", "better": "good", "worse": "bad", "missing": "bad", "too noisy": "unsure"}
FEW_DIGITS = 12  # of a digest on the terminal


def show_report(checkpoint: Checkpoint, name: str) -> Report:
    facts = checkpoint.facts
    return Report(
        title=f"Checkpoint {name}",
        subtitle=f"{checkpoint.kind}, created {facts.get('created_at')}",
        headline=str(checkpoint.at("decision", "text") or ""),
        warnings=[*([EDITED] if checkpoint.was_edited else []), *map(str, facts.get("warnings") or [])],
        sections=[
            Section("Decision", _decision(facts)),
            Section("Verification", _figures(checkpoint)),
            Section("What was measured", [Facts(_measured(facts))]),
            Section("Machine and versions", [Facts(_environment(facts))]),
            Section("Settings in force", [_settings(facts)]),
        ],
    )


def diff_report(before: Checkpoint, after: Checkpoint, names: tuple[str, str]) -> Report:
    """Facts and settings that differ; figures with the interval of their ratio where both have several rounds."""
    differing = differences(before.facts, after.facts)
    environment = [each for each in differing if each.group in ENVIRONMENT]
    chosen = [each for each in differing if each.group not in ENVIRONMENT]
    sections = [
        Section(
            "Decisions", [Facts([(name, str(each.at("decision", "text"))) for name, each in _both(before, after)])]
        ),
        Section("Figures", [_figure_differences(before, after)]),
        Section("Settings, workload and load", [_fact_table(chosen, ("A", "B"))]),
        Section("Machine, versions and model", [_fact_table(environment, ("A", "B"))]),
    ]
    warnings = [f"{name}: {EDITED}" for name, each in zip(names, (before, after), strict=True) if each.was_edited]
    if found(before.facts, "workload", "hash") != found(after.facts, "workload", "hash"):
        warnings.append("the workloads differ: a ratio of figures shows the workload's effect too")
    headline = "" if differing else "All facts and settings are equal."
    return Report(title=f"A: {names[0]}, B: {names[1]}", headline=headline, warnings=warnings, sections=sections)


def verification_report(result: Verification, name: str) -> Report:
    headlines = {
        "holds": "The checkpoint holds.",
        "does not hold": "The checkpoint does not hold.",
        "not verified": "The checkpoint could not be verified.",
    }
    environment = [each for each in result.differences if each.group in ENVIRONMENT]
    others = [each for each in result.differences if each.group not in ENVIRONMENT]
    sections = [Section("Figures", [_judgements(result)])]
    if result.reasons:
        sections.insert(0, Section("Reasons", [Note(reason) for reason in result.reasons]))
    if others:
        sections.append(Section("Settings that came out differently", [_fact_table(others, ("recorded", "now"))]))
    sections.append(Section("Environment", [_fact_table(environment, ("recorded", "now"))]))
    warnings = list(result.warnings)
    if environment:
        groups = ", ".join(dict.fromkeys(each.group for each in environment))
        warnings.append(f"this is not the recorded environment: {groups} differ")
    return Report(
        title=f"Verification of {name}", headline=headlines[result.outcome], warnings=warnings, sections=sections
    )


def _both(before: Checkpoint, after: Checkpoint) -> list[tuple[str, Checkpoint]]:
    return [("A", before), ("B", after)]


def _decision(facts: Mapping[str, Any]) -> list[Part]:
    text, reason = (found(facts, "decision", key) for key in ("text", "reason"))
    parts: list[Part] = [] if reason == text else [Note(str(reason or NOT_AVAILABLE))]  # the headline has the text
    rows = [
        [
            str(each.get("role")),
            str(each.get("name")),
            ratio(each.get("ratio")),
            _range(each.get("interval")),
            "yes" if each.get("is_shown") else "no",
        ]
        for each in found(facts, "decision", "alternatives") or []
    ]
    if rows:
        columns = ["against", "config", "ratio", "95 % interval", "difference shown"]
        parts.append(Table(columns, rows, num_text_columns=2))
    return parts


def _figures(checkpoint: Checkpoint) -> list[Part]:
    judged = checkpoint.at("verification", "judged") or []
    rows = []
    for load in checkpoint.facts["verification"]["loads"]:
        for name, value in load["figures"].items():
            if name not in BY_NAME:
                continue
            figure, values = BY_NAME[name], values_of(name, load["rounds"])
            tolerance = percent(tolerance_of(values, len(values), figure)[0]) if name in judged else "not judged"
            rows.append(
                [
                    load["load"],
                    figure.label,
                    number(found(value, "mean")),
                    _range(found(value, "interval")),
                    figure.unit,
                    tolerance,
                ]
            )
    rounds = checkpoint.at("verification", "num_rounds")
    caption = f"{rounds} round{'s' * (rounds != 1)}; tolerance: the loss with which the checkpoint still holds"
    columns = ["load", "figure", "mean", "95 % interval", "unit", "tolerance"]
    return [Table(columns, rows, num_text_columns=2, caption=caption)]


def _measured(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, workload = facts["model"], facts["workload"]
    return [
        ("command", str(facts.get("command") or NOT_AVAILABLE)),
        ("launch command", str(found(facts, "engine", "launch_command") or NOT_AVAILABLE)),
        ("model", f"{model.get('name')}, digest {_short(model.get('digest'))}"),
        ("workload", f"{workload.get('name')}, {plain(workload.get('num_requests'))} requests"),
        ("workload hash", str(workload.get("hash") or NOT_AVAILABLE)),
        ("load", plain(facts.get("load"))),
        ("SLO", str(facts.get("slo") or "none")),
        ("measured", str(facts.get("measured_at") or facts.get("created_at"))),
    ]


def _environment(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = facts["machine"]
    gpus = [f"{gpu.get('name')}, driver {gpu.get('driver_version')}" for gpu in machine.get("gpus") or []]
    engine = facts["engine"]
    return [
        ("CPU", f"{machine.get('cpu')}, {machine.get('num_cores')} cores, {memory(machine.get('memory_bytes'))}"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("system", str(machine.get("platform"))),
        ("engine", f"{engine.get('name')} ({plain(engine.get('versions'))})"),
        ("packages", plain(facts["versions"])),
        ("commit", str(facts.get("commit"))),
    ]


def _settings(facts: Mapping[str, Any]) -> Table:
    rows = [
        [name, plain(found(setting, "value")), str(found(setting, "source")), str(found(setting, "reason") or "")]
        for name, setting in facts["engine"]["settings"].items()
    ]
    return Table(["setting", "value", "source", "reason"], rows, num_text_columns=4)


def _figure_differences(before: Checkpoint, after: Checkpoint) -> Part:
    loads = [{each["load"]: each for each in side.facts["verification"]["loads"]} for side in (before, after)]
    rows: list[Sequence[str | Cell]] = []
    for label in dict.fromkeys((*loads[0], *loads[1])):
        sides = [side.get(label, {"rounds": []})["rounds"] for side in loads]
        for name, figure in BY_NAME.items():
            values = [values_of(name, rounds) for rounds in sides]
            if not any(values):
                continue
            means = [sum(each) / len(each) if each else None for each in values]
            known = ratio_of_rounds(*values)
            rows.append(
                [
                    label,
                    figure.label,
                    *(number(mean) for mean in means),
                    ratio(means[1] / means[0]) if means[0] and means[1] is not None else NOT_AVAILABLE,
                    NOT_AVAILABLE if known is None else interval(known.low, known.high),
                ]
            )
    if not rows:
        return Note("No figure was recorded.")
    return Table(["load", "figure", "A", "B", "B / A", "95 % interval"], rows, num_text_columns=2)


def _fact_table(differing: Sequence[FactDifference], columns: tuple[str, str]) -> Part:
    if not differing:
        return Note("No difference.")
    rows = [[each.group, each.name, each.before, each.after] for each in differing]
    return Table(["kind", "name", *columns], rows, num_text_columns=4)


def _judgements(result: Verification) -> Part:
    rows: list[Sequence[str | Cell]] = [
        [
            each.load,
            each.figure.label,
            number(each.recorded),
            number(each.now),
            ratio(each.ratio),
            _range(each.interval),
            percent(each.tolerance),
            Cell(each.verdict, TONES[each.verdict]),
        ]
        for each in result.judgements
    ]
    least = sorted({percent(minimum_of(each.figure).with_rounds, 0) for each in result.judgements})
    caption = f"tolerance: from the recorded noise, at least {' or '.join(least)}" if least else ""
    columns = ["load", "figure", "recorded", "now", "ratio", "95 % interval", "tolerance", "verdict"]
    return Table(columns, rows, num_text_columns=2, caption=caption)


def _range(given: Any) -> str:
    return interval(*given) if isinstance(given, (list, tuple)) and len(given) == 2 else NOT_AVAILABLE


def _short(digest: Any) -> str:
    return str(digest)[:FEW_DIGITS] if digest else NOT_AVAILABLE
