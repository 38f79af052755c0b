"""Which decode graphs are captured, in which order, and how progress is counted. Needs no GPU: nothing is captured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from headrace.runner.gpu import decode_graphs
from headrace.runner.gpu.capture import Capture
from headrace.runner.gpu.decode_graphs import DecodeGraph, DecodeGraphs

CAPTURE = Capture(None, torch.device("cpu"))


class FakeStream:
    def __init__(self, device: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is captured, in order."""
    events: list[Any] = []

    def captured(size: int, *arguments: Any, is_sharing: bool) -> DecodeGraph:
        events.append((size, is_sharing))
        return DecodeGraph(size, *[None] * 4)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_graphs, "_captured", captured)
    monkeypatch.setattr(decode_graphs, "_replay_milliseconds", lambda graph: 1.0)
    monkeypatch.setattr(decode_graphs, "stream_after_current", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return events


@pytest.mark.parametrize("enable_sharing", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 7, 100])
def test_every_graph_is_counted_once(events: list[Any], max_num_seqs: int, enable_sharing: bool) -> None:
    graphs = DecodeGraphs(max_num_seqs, enable_sharing=enable_sharing)
    graphs.capture(
        lambda size, *, is_sharing: torch.empty(0), lambda *a: torch.empty(0), CAPTURE, lambda: events.append(1)
    )
    assert events[1::2] == [1] * graphs.num_graphs
    assert len(set(events[::2])) == graphs.num_graphs
    plain = [size for size, is_sharing in events[::2] if not is_sharing]
    assert plain == sorted(plain, reverse=True) and plain[0] >= max_num_seqs
    assert any(is_sharing for _, is_sharing in events[::2]) == enable_sharing
    for num_seqs in range(1, max_num_seqs + 1):
        assert graphs.fitting(num_seqs, is_sharing=False).size >= num_seqs


def test_rows_of_drafts_have_graphs_but_share_no_prefixes(events: list[Any]) -> None:
    graphs = DecodeGraphs(8, enable_sharing=True, max_draft_rows=40)
    graphs.capture(lambda size, *, is_sharing: torch.empty(0), lambda *a: torch.empty(0), CAPTURE, lambda: None)
    assert graphs.fitting(40, is_sharing=False).size >= 40
    assert [size for size, is_sharing in events if is_sharing] == [8]
    assert graphs.fitting(8, is_sharing=True).size == 8


def test_the_warm_up_runs_the_largest_and_the_smallest_sizes(events: list[Any]) -> None:
    sizes: list[tuple[int, bool]] = []
    samples: list[bool] = []

    def forward(size: int, *, is_sharing: bool) -> torch.Tensor:
        sizes.append((size, is_sharing))
        return torch.empty(0)

    def sample(logits: torch.Tensor, has_filters: bool) -> torch.Tensor:
        samples.append(has_filters)
        return logits

    graphs = DecodeGraphs(100, enable_sharing=True)
    graphs.warm_up(forward, sample, torch.device("cpu"))
    assert sizes[0] == (112, True)
    assert sorted(sizes[1:]) == [(1, False), (2, False), (112, False)]
    assert sorted(samples) == [False] * 3 + [True] * 3
    sizes.clear()
    graphs.warm_up(forward, None, torch.device("cpu"), has_adapters=True)
    assert not any(is_sharing for _, is_sharing in sizes)
    assert events == []
