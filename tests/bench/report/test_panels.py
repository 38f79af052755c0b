"""Grouped bars: heights in proportion, labels apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from headrace.bench.report.panels import LABEL_LINE, Group, GroupBar, Look, Panel, panel_chart

LOOK = Look({"headrace": "#0d9488", "sglang": "#d97706", "vllm": "#7c8aa0"}, own="headrace", unit="vllm")


def test_a_bar_is_as_high_as_its_throughput() -> None:
    group = Group("chat", (GroupBar("headrace", 4.0), GroupBar("vllm", 1.0)))
    drawn = ET.fromstring(panel_chart([Panel("a model", (group,))], LOOK, title="t", subtitle="s", names={}))
    bars = [element for element in drawn.iter("{http://www.w3.org/2000/svg}rect") if element.get("fill")]
    heights = [float(bar.get("height", "0")) for bar in bars]
    assert heights[0] == pytest.approx(4 * heights[1], abs=0.2)


def test_labels_of_bars_of_nearly_the_same_height_do_not_overlap() -> None:
    group = Group("chat", (GroupBar("headrace", 1.22), GroupBar("sglang", 1.15)))
    drawn = ET.fromstring(panel_chart([Panel("a model", (group,))], LOOK, title="t", subtitle="s", names={}))
    texts = drawn.iter("{http://www.w3.org/2000/svg}text")
    own, peer = (float(text.get("y", "0")) for text in texts if "value" in text.get("class", ""))
    assert peer - own >= LABEL_LINE - 0.1  # coordinates have one decimal
