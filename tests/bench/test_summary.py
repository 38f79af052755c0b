"""Figures of outcomes: answered work only, pooled percentiles."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench.outcomes import Outcome
from headrace.bench.slo import Slo
from headrace.bench.summary import distribution, percentile, summarize, warnings_of


def ok(index: int, first: float, end: float, tokens: int) -> Outcome:
    return Outcome(
        index=index,
        due_s=0.0,
        sent_s=0.5,
        first_s=first,
        end_s=end,
        num_prompt_tokens=10,
        num_output_tokens=tokens,
        chunk_s=[first, end],
    )


def lost(index: int, status: str) -> Outcome:
    return Outcome(index=index, due_s=0.0, sent_s=0.0, end_s=0.01, status=status, error="503 queue full")  # type: ignore[arg-type]


def test_rates_count_answered_work_only() -> None:
    outcomes = [ok(0, 1.0, 2.0, 11), ok(1, 2.0, 4.0, 21), *[lost(i, "refused") for i in range(2, 10)]]
    summary = summarize(outcomes, seconds=4.0)
    assert summary["requests_per_s"] == 0.5
    assert summary["output_tokens_per_s"] == 8.0
    assert summary["total_tokens_per_s"] == 13.0
    assert summary["num_refused"] == 8
    assert summary["errors"] == {"503 queue full": 8}


def test_latency_counts_from_when_a_request_was_due() -> None:
    summary = summarize([ok(0, 1.0, 2.0, 11)], seconds=2.0)
    assert summary["ttft_ms"]["p50"] == 1000.0
    assert summary["e2e_ms"]["p50"] == 2000.0
    assert summary["tpot_ms"]["p50"] == pytest.approx(100.0)


def test_refusals_are_warned_about() -> None:
    warnings = warnings_of(summarize([ok(0, 1, 2, 3), lost(1, "refused"), lost(2, "timeout")], 2.0))
    assert "1 of 3 requests were not answered (429 or 503)" in warnings[0]
    assert "no answer in time" in warnings[1]


def test_no_answer_at_all_is_not_an_error() -> None:
    summary = summarize([lost(0, "failed")], 1.0, Slo.parse("ttft:p99<1s"))
    assert summary["requests_per_s"] == 0
    assert summary["ttft_ms"] is None
    assert summary["slo"]["goodput_requests_per_s"] == 0


def test_percentiles_are_those_of_numpy() -> None:
    values = sorted(np.random.default_rng(5).normal(size=37).tolist())
    for percent in (0, 1, 50, 90, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None
