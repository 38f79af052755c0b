"""The committed figures are what benchmarks/figures.py draws from the committed records."""

from __future__ import annotations

import pytest
from benchmarks import figures


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_as_new_as_its_records(name: str) -> None:
    """If this fails, run `make figures`."""
    assert (figures.IMAGES / name).read_text(encoding="utf-8") == figures.FIGURES[name]()


def test_throughput_is_relative_to_the_peer_on_the_same_workload() -> None:
    seconds = {
        row["engine"]: row["seconds"]
        for row in figures.read("peers-h200.jsonl")
        if (row["suite"], row["model"], row["workload"]) == ("2026-11", "llama-3.2-1b", "chat")
    }
    assert f">{seconds['vllm'] / seconds['headrace']:.1f}</text>" in figures.newest_peers()
