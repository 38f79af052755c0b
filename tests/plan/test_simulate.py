"""Simulated steps: as many as the engine took, and within its limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.plan.simulate import StepLimits, simulate
from headrace.plan.workload import Workload, named, of_lengths, uniform

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512, cache_tokens=16_384)


def newest_records() -> list[dict[str, Any]]:
    lines = (RESULTS / "offline-h200.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return list({(row["model"], row["workload"], row["dtype"]): row for row in rows}.values())


def number(value: str | int) -> int:
    """Older records have settings as text."""
    return int(str(value).replace(",", ""))


@pytest.mark.parametrize("row", newest_records(), ids=lambda row: f"{row['model']}-{row['workload']}-{row['dtype']}")
def test_a_workload_takes_about_as_many_steps_as_it_did(row: dict[str, Any]) -> None:
    max_num_seqs = number(row["settings"]["max_num_seqs"])
    limits = StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        cache_tokens=16 * number(row["settings"]["num_blocks"]),
        min_free_slots_to_start=max_num_seqs // 32,
        full_step_tokens=2048,
        full_rate_seqs=512,
    )
    # Preemptions are not simulated: 18 of them cost 26 steps in one record.
    assert len(simulate(named(row["workload"]), limits)) == pytest.approx(row["num_steps"], rel=0.03)


@pytest.mark.parametrize(
    "workload",
    [
        uniform(100, 50, num_requests=300, spread=0.9),
        uniform(100, 50, num_requests=300, spread=0.9, concurrency=10),
        uniform(2000, 1, num_requests=20),  # in chunks
        of_lengths("prefixes", [(200 + i % 7, 20, i % 5, 160) for i in range(100)]),
        of_lengths("one", [(1, 1)]),
    ],
    ids=lambda workload: workload.name,
)
def test_every_token_is_computed_once_within_the_limits(workload: Workload) -> None:
    steps = simulate(workload, LIMITS)
    assert steps.sampled.sum() == workload.num_output_tokens
    assert steps.decode_seqs.sum() == workload.num_output_tokens - len(workload.requests)
    assert steps.tokens.max() <= LIMITS.max_num_batched_tokens
    assert steps.decode_seqs.max() <= LIMITS.max_num_seqs
    shared = sum({r.prefix_group: r.prefix_len for r in workload.requests if r.prefix_group >= 0}.values())
    of_prefixes = sum(r.prefix_len for r in workload.requests)
    assert steps.prefill_tokens.sum() == workload.num_prompt_tokens - of_prefixes + shared
    assert (steps.first_token <= steps.end).all()
    outputs = workload.columns()[1]
    assert (steps.end - steps.first_token >= outputs - 1).all()


def test_a_closed_loop_never_has_more_than_its_clients_in_flight() -> None:
    steps = simulate(uniform(50, 20, num_requests=100, spread=0.5, concurrency=7), LIMITS)
    in_flight = [int(((steps.arrival <= step) & (steps.end >= step)).sum()) for step in range(len(steps))]
    assert max(in_flight) == 7
    assert steps.max_running <= 7


def test_a_small_cache_bounds_the_sequences_that_run() -> None:
    workload = uniform(100, 100, num_requests=60)
    wide, narrow = (
        simulate(workload, StepLimits(max_num_seqs=64, max_num_batched_tokens=4096, cache_tokens=tokens))
        for tokens in (100_000, 2_500)
    )
    assert wide.max_running == 60
    assert 10 <= narrow.max_running <= 13  # 200 tokens each
    assert len(narrow) > 3 * len(wide)


def test_decoding_reads_each_context_and_a_shared_prefix_once() -> None:
    lengths = [(160, 3, 0, 128)] * 4
    roomy = StepLimits(max_num_seqs=64, max_num_batched_tokens=1024, cache_tokens=16_384)
    shared = simulate(of_lengths("shared", lengths), roomy)
    apart = simulate(of_lengths("apart", [(160, 3)] * 4), roomy)
    # The second token's query sees 161 tokens, the third's 162, for each of four sequences.
    np.testing.assert_allclose(apart.context_tokens[-2:], [4 * 161, 4 * 162])
    np.testing.assert_allclose(shared.context_tokens[-2:], [4 * 33 + 128, 4 * 34 + 128])
