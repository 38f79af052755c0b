"""Static against continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.bench.batching import measure_batching
from headrace.bench.engines import EngineFailure
from headrace.bench.workloads import Workload, WorkloadSpec, build
from tests.bench.engines_for_tests import FakeEngine

MIXED = build(WorkloadSpec(name="random", num_requests=64, input_len=4, output_len=20, spread=0.9))


def of_batch(settings: Mapping[str, Any], workload: Workload) -> float:
    """One second a token step: the sum of lengths over the batch size, but no less than the longest answer."""
    lens = [request.output_len for request in workload.requests]
    return float(max(*lens, sum(lens) / settings["max_num_seqs"]))


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    engine = FakeEngine(of_batch)
    record = measure_batching(engine, MIXED, {}, batch_sizes=(1, 16), num_rounds=1)
    one, static, continuous = record["rows"]
    assert (one["batch_size"], one["batching"], one["gain"]) == (1, "one at a time", 1.0)
    assert static["batching"] == "static"
    assert continuous["batching"] == "continuous"
    assert one["output_tokens_per_s"] < static["output_tokens_per_s"] < continuous["output_tokens_per_s"]
    batches = [MIXED.requests[first : first + 16] for first in range(0, 48, 16)]
    seconds = sum(max(request.output_len for request in batch) for batch in batches)
    assert static["rounds"] == [seconds]
    assert all(running.is_stopped for running in engine.started)


def test_a_size_that_does_not_fit_is_a_row() -> None:
    engine = FakeEngine(of_batch, refuses=lambda settings: settings["max_num_seqs"] > 16)
    record = measure_batching(engine, MIXED, {}, batch_sizes=(16, 64), num_rounds=1)
    assert [row.get("failure", {}).get("kind") for row in record["rows"]] == [None, None, "oom"]


def test_no_size_at_all_is_an_error() -> None:
    with pytest.raises(EngineFailure, match="out of memory"):
        measure_batching(FakeEngine(of_batch, refuses=lambda settings: True), MIXED, {}, num_rounds=1)
