"""A diagnosis as a report for bench's writers."""

from __future__ import annotations

from headrace.bench.report.document import Facts, Note, Part, Report, Section, Table
from headrace.doctor.diagnosis import Diagnosis
from headrace.doctor.findings import Advice, Finding

TITLES = {
    "live": "Live server",
    "offline": "Offline benchmark",
    "online": "Load test",
    "sweep": "Sweep",
    "job": "Batch job",
    "command": "Planned command",
}


def report_of(diagnosis: Diagnosis) -> Report:
    evidence = diagnosis.evidence
    engine = f", {evidence.engine}" if evidence.engine else ""
    over = f", over {evidence.seconds:,.1f} s" if evidence.seconds is not None else ""
    sections = [_section(finding, place) for place, finding in enumerate(diagnosis.findings, 1)]
    return Report(
        f"{TITLES[evidence.source]}: {evidence.origin}",
        subtitle=f"{diagnosis.outcome}{engine}{over}",
        headline=diagnosis.headline,
        warnings=evidence.remarks,
        sections=[*sections, *_unjudged(diagnosis)],
    )


def _section(finding: Finding, place: int) -> Section:
    by = f"rule {finding.rule}" + (f" (guides: {finding.guide})" if finding.guide else "")
    parts: list[Part] = [
        Facts([*finding.numbers, ("threshold", f"{finding.threshold}; {by}")]),
        Note(finding.why),
    ]
    if finding.advice:
        rows = [[advice.text, _gain(advice), _certainty(advice)] for advice in finding.advice]
        parts.append(Table(["what to change", "predicted gain", "how certain"], rows, num_text_columns=3))
    if finding.correction:
        parts.append(Note(f"Guides are wrong here: {finding.correction}"))
    return Section(f"{place}. {finding.severity}: {finding.title}", parts)


def _gain(advice: Advice) -> str:
    if advice.gain is None:
        return "not estimated"
    most = "up to " if advice.certainty == "bound" else "about "
    return f"{most}{1 + advice.gain:.2f}x"


def _certainty(advice: Advice) -> str:
    return f"{advice.certainty}: {advice.why}" if advice.why else advice.certainty


def _unjudged(diagnosis: Diagnosis) -> list[Section]:
    if not diagnosis.not_judged:
        return []
    rows = [[each.title, ", ".join(each.missing)] for each in diagnosis.not_judged]
    title = f"Not judged: {len(rows)} rules, {diagnosis.num_judged} were judged"
    return [Section(title, [Table(["rule", "missing"], rows, num_text_columns=2)])]


def rules_table() -> str:
    """The Markdown table of docs/doctor.md."""
    from headrace.doctor.rules import RULES

    rows = ["| rule | what it finds | guides | threshold | reads |", "| --- | --- | --- | --- | --- |"]
    for rule in RULES:
        sources = "all" if len(rule.sources) == len(TITLES) else ", ".join(rule.sources)
        rows.append(f"| `{rule.id}` | {rule.title} | {rule.guide or '–'} | {rule.threshold} | {sources} |")
    return "".join(f"{row}\n" for row in rows)
