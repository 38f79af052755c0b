"""Writes a report as Markdown, for pull requests and notes. Charts are left out: their numbers are in tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.bench.report.document import Chart, Code, Details, Facts, Note, Part, Report, Table, text_of

# What Markdown or embedded HTML would act on.
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def markdown(report: Report) -> str:
    lines = [f"# {_text(report.heading)}", ""]
    for line in report.under_heading:
        lines += [_text(line), ""]
    lines += [f"> **Warning:** {_text(warning)}\n>" for warning in report.warnings]
    if report.warnings:
        lines[-1] = lines[-1].removesuffix("\n>")
        lines.append("")
    if report.later_headline:
        lines += [f"**{_text(report.later_headline)}**", ""]
    for section in report.sections:
        lines += [f"## {_text(section.title)}", "", *_parts(section.parts)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _parts(parts: Sequence[Part]) -> list[str]:
    lines: list[str] = []
    for part in parts:
        match part:
            case Table():
                lines += _table(part)
            case Facts():
                lines += [*(f"- {_text(name)}: {_text(value)}" for name, value in part.pairs), ""]
            case Code():
                lines += [*([f"{_text(part.caption)}:", ""] if part.caption else []), *_code(part.text), ""]
            case Note():
                lines += [_text(part.text), ""]
            case Details():
                lines += [f"### {_text(part.title)}", "", *_parts(part.parts)]
            case Chart():
                pass
    return lines


def _table(table: Table) -> list[str]:
    lines = [f"{_text(table.caption)}:", ""] if table.caption else []
    lines.append(_row([text_of(name) for name in table.columns]))
    lines.append(_rule(len(table.columns), table.num_text_columns))
    return [*lines, *(_row([text_of(cell) for cell in row]) for row in table.rows), ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _rule(num_columns: int, num_text: int) -> str:
    return "| " + " | ".join("---" if place < num_text else "---:" for place in range(num_columns)) + " |"


def _code(text: str) -> list[str]:
    """A fence that is longer than any in the text."""
    printable = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    longest = max((len(found) for found in re.findall(r"`+", printable)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", printable.rstrip("\n"), fence]


def _text(content: str) -> str:
    """One line, in which nothing is markup."""
    printable = "".join(c if c.isprintable() else " " for c in content)
    return SPECIAL.sub(r"\\\1", " ".join(printable.split()))
