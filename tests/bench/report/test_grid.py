"""Grids of boxes."""

from __future__ import annotations

from headrace.bench.report.grid import Box, grid_chart


def test_each_pair_has_a_box_and_the_first_row_is_at_the_bottom() -> None:
    boxes = {(0, 0): Box("ok", "good"), (1, 1): Box("failed", "bad", "out of memory")}
    chart = grid_chart(["1", "2"], ["low", "high"], boxes, x_label="x", y_label="y", title="t")
    assert chart.count("<rect") == 4
    assert chart.count("cell-plain") == 2  # pairs without a box
    assert "out of memory" in chart
    places = {word: float(chart.split(f">{word}<")[0].rsplit('y="', 1)[1].split('"')[0]) for word in ("low", "high")}
    assert places["low"] > places["high"]  # y grows downwards


def test_what_comes_from_a_record_is_escaped() -> None:
    boxes = {(0, 0): Box("<b>", "good", "<i>")}
    chart = grid_chart(["<u>"], ["<s>"], boxes, x_label="<x>", y_label="<y>", title="<t>")
    assert not any(tag in chart for tag in ("<b>", "<i>", "<u>", "<s>", "<x>", "<y>", "<t>"))
