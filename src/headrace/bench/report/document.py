"""A report as a document: what is said, without how it looks. page.py, markdown.py and terminal.py write it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["plain", "good", "bad", "unsure"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a judgement, which is never told by colour alone."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text. The first `num_text_columns` are aligned left, numbers right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    num_text_columns: int = 1
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture for the page. Text reports leave it out, so its numbers are in a table too."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Code:
    """Text as it is: a command, the end of a log."""

    text: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    text: str


@dataclass(frozen=True, slots=True)
class Details:
    """Parts that a page shows when asked, and a terminal leaves out."""

    title: str
    parts: Sequence[Part]


Part = Table | Chart | Facts | Code | Note | Details


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Report:
    """`headline` answers the question for which the reader came. Warnings come before all figures."""

    title: str
    subtitle: str = ""
    headline: str = ""
    warnings: Sequence[str] = ()
    tiles: Sequence[tuple[str, str]] = ()  # a few large figures: name, value
    sections: Sequence[Section] = field(default_factory=tuple)
    is_headline_first: bool = False  # the headline is the heading, and the title stands under it

    @property
    def heading(self) -> str:
        return self.headline if self.is_headline_first and self.headline else self.title

    @property
    def under_heading(self) -> list[str]:
        """Lines under the heading."""
        lines = [self.title, self.subtitle] if self.heading != self.title else [self.subtitle]
        return [line for line in lines if line]

    @property
    def later_headline(self) -> str:
        """The headline after the warnings, unless it is the heading."""
        return "" if self.is_headline_first else self.headline


def text_of(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def tone_of(cell: str | Cell) -> Tone:
    return cell.tone if isinstance(cell, Cell) else "plain"


def grouped(warnings: Iterable[tuple[str, str]]) -> list[str]:
    """Warnings of several things, each with the thing's label. Those that differ only in numbers are one line."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for label, warning in warnings:
        groups.setdefault(re.sub(r"[\d,.]+", "#", warning), []).append((label, warning))
    lines = []
    for (label, warning), *others in groups.values():
        labels = list(dict.fromkeys(other for other, _ in others if other != label))
        lines.append(f"{label}: {warning}" + (f" (likewise: {', '.join(labels)})" if labels else ""))
    return lines
