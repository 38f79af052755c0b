"""Writes a report on a terminal: warnings, the headline, and the tables. Details and charts are left to the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from headrace.bench.report.document import Chart, Code, Details, Facts, Note, Part, Report, Table, text_of, tone_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table as RichTable

STYLES = {"plain": "", "good": "green", "bad": "red", "unsure": "yellow"}
PLAIN_WIDTH = 200  # of a file or a pipe, which has no width of its own


def print_report(report: Report, stream: TextIO) -> None:
    console = _console(stream)
    for part in renderables(report):
        console.print(part)


def renderables(report: Report) -> list[RenderableType]:
    """The report as parts that rich prints. Text is never read as rich's markup."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(_plain(report.heading), style="bold")]
    parts += [Text(_plain(line), style="dim") for line in report.under_heading]
    parts += [Text(f"! {_plain(warning)}", style="yellow") for warning in report.warnings]
    if report.later_headline:
        parts.append(Text(_plain(report.later_headline), style="bold"))
    for section in report.sections:
        shown = _parts(section.parts)
        if shown:
            parts += [Text(""), Text(_plain(section.title), style="bold underline"), *shown]
    return parts


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    is_terminal = stream.isatty()
    return Console(file=stream, highlight=False, soft_wrap=False, width=None if is_terminal else PLAIN_WIDTH)


def _parts(parts: Sequence[Part]) -> list[RenderableType]:
    from rich.text import Text

    shown: list[RenderableType] = []
    for part in parts:
        match part:
            case Table():
                if part.caption:
                    shown.append(Text(_plain(part.caption), style="dim"))
                shown.append(_table(part))
            case Facts():
                shown.append(_facts(part))
            case Code():
                if part.caption:
                    shown.append(Text(_plain(part.caption), style="dim"))
                shown.append(Text("\n".join(f"  {_plain(line)}" for line in part.text.splitlines())))
            case Note():
                shown.append(Text(_plain(part.text), style="dim"))
            case Chart() | Details():
                pass
    return shown


def _table(table: Table) -> RichTable:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for place, name in enumerate(table.columns):
        is_text = place < table.num_text_columns
        shown.add_column(Text(_plain(name)), justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(_plain(text_of(cell)), style=STYLES[tone_of(cell)]) for cell in row))
    return shown


def _facts(facts: Facts) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in facts.pairs:
        shown.add_row(Text(_plain(name)), Text(_plain(value)))
    return shown


def _plain(text: str) -> str:
    """One line without control characters: a log line must not move the cursor or change colours."""
    return "".join(c if c.isprintable() else " " for c in text)
