"""The HTML page: self-contained, readable without scripts, every string escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.record import RecordError
from headrace.bench.report.document import Cell, Code, Details, Facts, Note, Report, Section, Table
from headrace.bench.report.offline import offline_report
from headrace.bench.report.online import online_report
from headrace.bench.report.page import page, write_page
from headrace.bench.values import NOT_AVAILABLE
from tests.bench.records import base_record, level, offline_record, online_record, outcomes

HOSTILE = "<img src=x onerror=alert(1)>\"'&</style></svg><script>alert(2)</script>\x1b[31m\x00"


class Elements(HTMLParser):
    """Collects elements, and checks that they are closed in order."""

    EMPTY = ("meta", "rect", "line", "path", "circle", "polygon")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in self.EMPTY or tag in ("rect", "path", "circle", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    assert elements.open == []
    return elements


def hostile(value: Any) -> Any:
    """The same structure with hostile text in place of every string, keys included where they are shown."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, dict):
        return {key: hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return value


def full_online() -> Report:
    slo = "ttft:p95<60ms;success>=0.99"
    rows = [outcomes(seed=1), outcomes(seed=2, ttft_s=0.2, num_refused=40)]
    record = online_record([level(1, rows[0], slo=slo), level(16, rows[1], slo=slo, steady=None)])
    return online_report(record, rows)


@pytest.mark.parametrize("make", [full_online, lambda: offline_report(offline_record())])
def test_a_page_loads_nothing_and_has_no_script(make: Callable[[], Report]) -> None:
    html = page(make())
    found = parsed(html)
    assert not {"script", "link", "iframe", "img"} & set(found.names)
    assert not {"href", "src", "onload", "onerror"} & set(found.attributes)
    assert re.findall(r"https?://[^\s\"]+", html.replace("http://www.w3.org/2000/svg", "")) == []
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_hostile_text_of_a_record_stays_text(kind: str) -> None:
    if kind == "online":
        rows = [outcomes(20, num_refused=3)]
        record = hostile(online_record([level(1, rows[0], slo="ttft:p95<60ms")], warnings=["w"]))
        record["levels"][0]["summary"]["errors"] = {HOSTILE: 3}
        html = page(online_report(record, rows))
    else:
        html = page(offline_report(hostile(offline_record(warnings=["w"], telemetry={"reason": "none"}))))
    found = parsed(html)
    assert not {"script", "img"} & set(found.names)
    assert "onerror" not in found.attributes
    assert "\x1b" not in html and "\x00" not in html
    assert "&lt;img src=x" in html


def test_every_part_of_a_document_is_escaped() -> None:
    parts = [
        Table([HOSTILE], [[Cell(HOSTILE, "bad")]], caption=HOSTILE),
        Facts([(HOSTILE, HOSTILE)]),
        Code(HOSTILE, HOSTILE),
        Note(HOSTILE),
    ]
    report = Report(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        [HOSTILE],
        [(HOSTILE, HOSTILE)],
        [Section(HOSTILE, [*parts, Details(HOSTILE, parts)])],
    )
    assert not {"script", "img"} & set(parsed(page(report)).names)


def test_warnings_come_before_all_figures() -> None:
    report = full_online()
    html = page(report)
    assert any("40 of 240 requests were not answered" in warning for warning in report.warnings)
    assert html.index("requests were not answered") < html.index('class="tiles"') < html.index("<h2>")


def test_what_is_missing_is_not_available_and_never_zero() -> None:
    record = base_record("online", levels=[{"load": {"concurrency": 4}}])
    report = online_report(record)
    curve = report.sections[0].parts[-1]
    assert isinstance(curve, Table)
    assert [str(cell) for cell in curve.rows[0][1:8]] == [NOT_AVAILABLE] * 7
    parsed(page(report))
    bare = offline_report({"kind": "offline", "rounds": [{}]})
    assert dict(bare.tiles)["output tokens/s, median"] == NOT_AVAILABLE
    parsed(page(bare))
    parsed(page(offline_report({})))
    parsed(page(online_report({})))


def test_figures_are_of_the_steady_window_where_there_is_one() -> None:
    rows = outcomes()
    steady, whole = level(4, rows), level(4, rows, steady=None)
    table = online_report(online_record([steady, whole])).sections[0].parts[-1]
    assert isinstance(table, Table)
    assert table.rows[0][-1] == "3.00 to 18.0 s"
    assert table.rows[1][-1] == "whole run: the run was shorter than two windows"


def test_an_unresolved_condition_is_not_shown_as_met() -> None:
    html = page(online_report(online_record([level(1, outcomes(20), slo="ttft:p99<10s")])))
    assert "? unresolved" in html
    assert "No level is shown to meet the SLO." in html


def test_a_level_without_refusals_has_no_chart_of_refusals() -> None:
    html = page(online_report(online_record()))
    assert "Requests by outcome" not in html
    assert "Distributions are not available: this report has no request rows." in html


def test_the_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(Report("one"), path)
    write_page(Report("two"), path)
    assert "<h1>two</h1>" in path.read_text()
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"report\.html"):
        write_page(Report("one"), tmp_path / "file" / "report.html")


def test_the_limits_of_the_slo_are_drawn() -> None:
    levels = [level(load, outcomes(20), slo="ttft:p95<60ms;success>=0.9") for load in (1, 4)]
    assert "SLO: ttft:p95&lt;60ms" in page(online_report(online_record(levels)))
    for each in levels:
        each["summary"]["slo"]["text"] = each["steady"]["summary"]["slo"]["text"] = "of another version"
    page(online_report(online_record(levels)))
