"""The committed figures are what benchmarks/figures.py draws from the committed records."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from benchmarks import figures


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_as_new_as_its_records(name: str) -> None:
    """If this fails, run `make figures`."""
    assert (figures.IMAGES / name).read_text(encoding="utf-8") == figures.FIGURES[name]()


def test_a_bar_is_as_high_as_its_throughput() -> None:
    group = figures.Group("chat", (figures.Bar("headrace", 4.0), figures.Bar("vllm", 1.0)))
    drawn = ET.fromstring(figures.draw([figures.Panel("a model", (group,))], title="t", subtitle="s", names={}))
    bars = [element for element in drawn.iter("{http://www.w3.org/2000/svg}rect") if element.get("fill")]
    heights = [float(bar.get("height", "0")) for bar in bars]
    assert heights[0] == pytest.approx(4 * heights[1], abs=0.2)


def test_labels_of_bars_of_nearly_the_same_height_do_not_overlap() -> None:
    group = figures.Group("chat", (figures.Bar("headrace", 1.22), figures.Bar("sglang", 1.15)))
    drawn = ET.fromstring(figures.draw([figures.Panel("a model", (group,))], title="t", subtitle="s", names={}))
    texts = drawn.iter("{http://www.w3.org/2000/svg}text")
    own, peer = (float(text.get("y", "0")) for text in texts if "value" in text.get("class", ""))
    assert peer - own >= figures.LABEL_LINE - 0.1  # coordinates have one decimal


def test_throughput_is_relative_to_the_peer_on_the_same_workload() -> None:
    seconds = {
        row["engine"]: row["seconds"]
        for row in figures.read("peers-h200.jsonl")
        if (row["suite"], row["model"], row["workload"]) == ("2026-11", "llama-3.2-1b", "chat")
    }
    assert f">{seconds['vllm'] / seconds['headrace']:.1f}</text>" in figures.newest_peers()
