"""Prompts are chunked to fill small steps, and left whole where a step is large enough without them."""

from __future__ import annotations

import numpy as np

from headrace.sched import Scheduler
from headrace.sched.limits import SchedulerLimits
from headrace.types import Request, SamplingParams


def scheduler(full_step_tokens: int) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=100,
        max_model_len=200,
        num_blocks=100,
        full_step_tokens=full_step_tokens,
    )
    return Scheduler(limits)


def add(target: Scheduler, name: str, length: int) -> None:
    prompt = np.arange(length, dtype=np.int32) + 10 * ord(name)
    target.add(Request(name, prompt, SamplingParams(max_tokens=5)), seeds=(0,), stop_token_ids=())


def planned(target: Scheduler) -> list[int]:
    plan = target.plan()
    assert plan is not None
    return [int(count) for count in plan.num_tokens]


def test_a_prompt_that_does_not_fit_into_a_full_step_waits_for_the_next() -> None:
    target = scheduler(full_step_tokens=60)
    for name in "abc":
        add(target, name, 40)
    assert planned(target) == [40, 40]
    assert planned(target) == [1, 1, 40]


def test_a_small_step_is_filled_with_a_chunk() -> None:
    target = scheduler(full_step_tokens=90)
    for name in "abc":
        add(target, name, 40)
    assert planned(target) == [40, 40, 20]
    assert planned(target) == [1, 1, 20]


def test_a_prompt_longer_than_a_step_is_chunked() -> None:
    target = scheduler(full_step_tokens=60)
    add(target, "a", 150)
    assert planned(target) == [100]
    assert planned(target) == [50]


def test_fewer_may_run_than_there_are_slots() -> None:
    target = scheduler(full_step_tokens=60)
    target.max_running = 2
    for name in "abc":
        add(target, name, 10)
    assert planned(target) == [10, 10]
    target.max_running = 8
    assert planned(target) == [1, 1, 10]
