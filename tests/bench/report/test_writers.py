"""Markdown and terminal: the same document as the page, with no string read as markup."""

from __future__ import annotations

import io
import re

import pytest

from headrace.bench.report.document import Cell, Chart, Code, Details, Facts, Note, Report, Section, Table, grouped
from headrace.bench.report.markdown import markdown
from headrace.bench.report.online import online_report
from headrace.bench.report.terminal import print_report
from tests.bench.records import level, online_record, outcomes

REPORT = Report(
    "A title",
    "a subtitle",
    "The answer is 42.",
    ["first warning", "second warning"],
    [("tile", "7")],
    [
        Section(
            "A section",
            [
                Chart("a chart", "<svg></svg>"),
                Table(["name", "value"], [["a", "1"], ["b", Cell("2", "bad")]], caption="A table"),
                Facts([("cpu", "fast")]),
                Code("headrace serve", "Launch command"),
                Note("a note"),
                Details("More", [Code("a log line")]),
            ],
        )
    ],
)


def printed(report: Report) -> str:
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue()


def test_markdown_has_the_warnings_before_the_answer_and_tables_with_aligned_numbers() -> None:
    text = markdown(REPORT)
    assert text.index("second warning") < text.index("The answer is 42.") < text.index("## A section")
    assert "| name | value |\n| --- | ---: |\n| a | 1 |\n| b | 2 |" in text
    assert "```text\nheadrace serve\n```" in text
    assert "- cpu: fast" in text and "a log line" in text
    assert "svg" not in text


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "a|b", "[x](http://evil)", "`code`", "# title\n\n# next", "![i](x)"]
)
def test_markdown_reads_no_string_as_markup(hostile: str) -> None:
    text = markdown(
        Report(hostile, sections=[Section(hostile, [Table([hostile], [[hostile]]), Facts([(hostile, hostile)])])])
    )
    for line in text.splitlines():
        kept = re.sub(r"\\.", "", line.removeprefix("# ").removeprefix("## ").removeprefix("- "))
        assert not re.search(r"[<>`\[\]#]", kept)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 2 for row in rows)


def test_code_in_markdown_cannot_end_its_fence() -> None:
    text = markdown(Report("t", sections=[Section("s", [Code("```\n# not a title")])]))
    assert "````text\n```\n# not a title\n````" in text


def test_the_terminal_shows_warnings_answer_and_tables_without_details() -> None:
    text = printed(REPORT)
    assert text.index("! second warning") < text.index("The answer is 42.") < text.index("A section")
    assert re.search(r"^ *b +2 *$", text, re.MULTILINE)
    assert "headrace serve" in text and "a log line" not in text


def test_the_terminal_reads_no_string_as_markup_or_control_code() -> None:
    hostile = "[bold red]x[/] [/nothing] \x1b[2J\r:smile:"
    text = printed(
        Report(hostile, warnings=[hostile], sections=[Section(hostile, [Table([hostile], [[hostile]]), Code(hostile)])])
    )
    assert "\x1b" not in text and "\r" not in text
    assert text.count("[bold red]x[/] [/nothing]") == 6
    assert ":smile:" in text


def test_a_whole_report_can_be_written_in_all_forms() -> None:
    rows = [outcomes(50), outcomes(60, num_refused=5)]
    report = online_report(online_record([level(1, rows[0], slo="ttft:p50<1s"), level(4, rows[1])]), rows)
    for text in (markdown(report), printed(report)):
        assert "Time to first token" in text and "5 of 65 requests were not answered" in text


def test_warnings_that_differ_only_in_numbers_are_one_line() -> None:
    lines = grouped([("a", "p99 of 46 requests"), ("b", "p99 of 1,046 requests"), ("b", "refused")])
    assert lines == ["a: p99 of 46 requests (likewise: b)", "b: refused"]
