"""A diagnosis as a report for bench's writers."""

from __future__ import annotations

from collections.abc import Callable

from headrace.bench.report.document import Facts, Note, Part, Report, Section, Table
from headrace.bench.values import number, percent, seconds
from headrace.doctor.diagnosis import Diagnosis
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import Advice, Finding

TITLES = {
    "live": "Live server",
    "offline": "Offline benchmark",
    "online": "Load test",
    "sweep": "Sweep",
    "job": "Batch job",
    "command": "Planned command",
}
SEEN: dict[str, tuple[str, Callable[[float], str]]] = {
    "prompt_tokens_per_s": ("prompt tokens/s", number),
    "output_tokens_per_s": ("generated tokens/s", number),
    "num_running": ("running", number),
    "num_waiting": ("waiting", number),
    "kv_use": ("KV cache use", percent),
    "num_preemptions": ("preemptions", number),
    "prefix_hit_share": ("prefix cache hits", percent),
    "prompt_len": ("prompt length, mean", number),
    "output_len": ("answer length, mean", number),
    "tokens_per_step": ("tokens per step", number),
    "host_share": ("host time of a step", percent),
    "queue_p95_s": ("queue time, p95", seconds),
    "ttft_p95_s": ("time to first token, p95", seconds),
    "token_gap_p50_s": ("inter-token latency, p50", seconds),
    "token_gap_p99_s": ("inter-token latency, p99", seconds),
    "gpu_utilization": ("GPU utilisation", percent),
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
        sections=[*sections, *_seen(evidence), *_unjudged(diagnosis)],
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


def _seen(evidence: Evidence) -> list[Section]:
    """The figures that rules judged, for a reader who judges them too."""
    figures = evidence.figures()
    shown: list[tuple[str, str]] = [
        (label, show(figures[name])) for name, (label, show) in SEEN.items() if name in figures
    ]
    return [Section("What was seen", [Facts(shown)])] if shown and evidence.is_measured else []


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
