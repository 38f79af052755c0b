"""A comparison as a report: one table of ratios for each workload and load, and everything else that differs."""

from __future__ import annotations

from collections import Counter

from headrace.bench.compare import Comparison, Difference, Match
from headrace.bench.report.bars import Bar, bar_chart
from headrace.bench.report.document import Cell, Chart, Note, Part, Report, Section, Table, Tone
from headrace.bench.report.scales import Axis
from headrace.bench.report.svg import shortened
from headrace.bench.values import NOT_AVAILABLE, number, percent, ratio

# Colours of dots: teal, magenta, grey.
PLACES = {"better": 0, "worse": 3}
TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "no difference shown": "plain"}


def comparison_report(comparison: Comparison) -> Report:
    sections = [_match(match, comparison) for match in comparison.matches]
    if comparison.only_before or comparison.only_after:
        rows = [[label, f"{comparison.before} only"] for label in comparison.only_before]
        rows += [[label, f"{comparison.after} only"] for label in comparison.only_after]
        sections.append(
            Section("Not compared", [Table(["workload and load", "measured in"], rows, num_text_columns=2)])
        )
    facts = [[each.group, each.name, each.before, each.after] for each in comparison.facts]
    columns = ["", "name", comparison.before, comparison.after]
    parts: list[Part] = (
        [Table(columns, facts, num_text_columns=4)] if facts else [Note("Nothing: all recorded facts are equal.")]
    )
    return Report(
        f"{comparison.after} against {comparison.before}",
        "Ratios are the second to the first, with a 95 % interval.",
        headline=_headline(comparison),
        warnings=comparison.warnings,
        sections=[*sections, Section("What else differs", parts)],
    )


def _headline(comparison: Comparison) -> str:
    first = next((each for match in comparison.matches for each in match.differences), None)
    counts = Counter(each.verdict for match in comparison.matches for each in match.differences)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if first is None or first.ratio is None:
        return f"Figures: {counted or 'none'}."
    shown = f"{first.label}: {ratio(first.ratio)}x" + (
        f" [{ratio(first.interval[0])}, {ratio(first.interval[1])}]" if first.interval else ""
    )
    return f"{shown}, {first.verdict}. All figures: {counted}."


def _match(match: Match, comparison: Comparison) -> Section:
    rows = [_row(each) for each in match.differences]
    columns = ["figure", comparison.before, comparison.after, "ratio", "95 % interval", "verdict", "interval is over"]
    basis = "the steady windows" if match.uses_steady else "the whole runs"
    note = Note(f"{match.num_before} and {match.num_after} rounds; figures are of {basis}.")
    return Section(match.label, [*_chart(match), note, Table([shortened(c, 40) for c in columns], rows)])


def _row(each: Difference) -> list[str | Cell]:
    before, after = (NOT_AVAILABLE if value is None else _shown(each, value) for value in (each.before, each.after))
    interval = f"{ratio(each.interval[0])} to {ratio(each.interval[1])}" if each.interval else NOT_AVAILABLE
    verdict = Cell(each.verdict, TONES.get(each.verdict, "unsure"))
    return [each.label, before, after, ratio(each.ratio), interval, verdict, each.basis]


def _shown(each: Difference, value: float) -> str:
    return percent(value, 2) if each.name.endswith("_share") else number(float(value), each.unit)


def _chart(match: Match) -> list[Chart]:
    """Ratios with their intervals side by side; the line at 1 means equal."""
    shown = [each for each in match.differences if each.ratio and each.interval]
    if len(shown) < 2:
        return []
    title = f"Ratios, {match.label}"
    bars = [
        Bar(
            each.label,
            each.ratio,
            f"{ratio(each.ratio)} {each.verdict if each.verdict in ('better', 'worse') else ''}".rstrip(),
            low=each.interval[0] if each.interval else None,
            high=each.interval[1] if each.interval else None,
            place=PLACES.get(each.verdict, 5),
        )
        for each in shown
    ]
    axis = Axis("ratio, log scale; the dashed line means equal", is_log=True)
    return [Chart(title, bar_chart(bars, axis, title=title, mark=1.0, are_dots=True))]
