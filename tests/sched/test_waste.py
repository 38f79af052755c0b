"""How much of the KV cache is held but empty."""

from __future__ import annotations

import random

import numpy as np

from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits, SchedulerStats
from headrace.types import Request, SamplingParams


def chat_requests(num_requests: int, seed: int = 0) -> list[Request]:
    """Short, long-tailed prompts and answers, as in conversations."""
    rng = random.Random(seed)
    tokens = np.random.default_rng(seed)
    requests = []
    for number in range(num_requests):
        prompt_len = max(4, min(2048, int(rng.lognormvariate(4.8, 1.1))))
        answer_len = max(4, min(1024, int(rng.lognormvariate(5.0, 0.9))))
        prompt = tokens.integers(1_000, 100_000, prompt_len).astype(np.int32)
        requests.append(Request(f"{number}", prompt, SamplingParams(max_tokens=answer_len, ignore_eos=True)))
    return requests


def run(limits: SchedulerLimits, requests: list[Request]) -> SchedulerStats:
    scheduler, runner = Scheduler(limits), FakeRunner(max_num_seqs=limits.max_num_seqs)
    for request in requests:
        scheduler.add(request, seeds=(0,), stop_token_ids=())
    while (plan := scheduler.plan()) is not None:
        scheduler.apply(runner.collect(runner.submit(plan)))
    return scheduler.stats


def test_less_than_four_per_cent_of_held_blocks_is_empty_on_a_chat_workload() -> None:
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=4096, num_blocks=20_000)
    stats = run(limits, chat_requests(500))
    assert stats.num_finished == 500
    assert 0.0 < stats.kv_waste < 0.04


def test_waste_is_the_share_of_positions_without_a_token() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=4)
    stats = run(limits, [Request("one", np.arange(10, dtype=np.int32), SamplingParams(max_tokens=3))])
    # Three steps with one block of 16: 11, 12 and 13 positions have a token once the step is planned.
    assert stats.kv_waste == (5 + 4 + 3) / (3 * 16)
