"""Requests with a readout: no token is sampled, however the prompt is chunked."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.sched import SchedulerLimits
from headrace.steps import ReadoutResult
from headrace.types import Readout
from tests.sched.checking_runner import NEVER_SAMPLED, Driver, make_request

PROMPT = list(range(1, 24))
TARGETS = np.array([5, 6, 7, 8, 9, 10, 11], np.int32)
ALL_READOUTS = [Readout(pooling="last"), Readout(pooling="mean"), Readout(targets=TARGETS)]


def make_driver(**changes: int) -> Driver:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 5, "max_model_len": 64, "num_blocks": 40, "block_size": 4}
    return Driver(SchedulerLimits(**sizes | changes))


@pytest.mark.parametrize("readout", ALL_READOUTS, ids=["last", "mean", "targets"])
def test_a_readout_ends_with_its_prompt_and_no_token(readout: Readout) -> None:
    driver = make_driver()
    driver.add(make_request("r", PROMPT, readout=readout))
    driver.drain(depth=2)
    driver.check_answers()
    driver.check_empty()
    answer = driver.answers["r", 0]
    assert answer.finish_reason == "length" and answer.token_ids == [] and answer.num_events == 1
    assert driver.scheduler.stats.num_generated_tokens == 0 and driver.scheduler.stats.num_finished == 1


def test_a_step_reads_out_only_the_tokens_of_the_readout() -> None:
    driver = make_driver()
    driver.add(make_request("r", PROMPT, readout=Readout(targets=TARGETS)))
    plans = [driver.step() for _ in range(5)]  # 23 tokens, five a step; the last seven are read out
    chunks = [plan.readout_chunks for plan in plans if plan is not None]
    assert [len(step) for step in chunks] == [0, 0, 0, 1, 1]
    assert [(chunk.first, chunk.num_tokens, chunk.is_last) for step in chunks for chunk in step] == [
        (1, 4, False),
        (0, 3, True),
    ]
    assert [chunk.targets.tolist() for step in chunks for chunk in step if chunk.targets is not None] == [
        [5, 6, 7, 8],
        [9, 10, 11],
    ]


def test_a_preempted_readout_starts_again_from_the_first_token() -> None:
    """The answer needs its last block while the readout, younger, is half computed."""
    driver = make_driver(max_num_seqs=2, max_num_batched_tokens=2, num_blocks=7, max_model_len=28)
    driver.add(make_request("old", [1], max_tokens=12, temperature=0), stop_token_ids=(NEVER_SAMPLED,))
    driver.step()
    driver.add(make_request("young", PROMPT, readout=Readout(pooling="mean")))
    driver.drain()
    assert driver.scheduler.stats.num_preemptions > 0
    driver.check_answers()
    driver.check_empty()


def test_nan_values_end_a_readout_with_an_error() -> None:
    driver = make_driver(max_num_batched_tokens=64)
    driver.add(make_request("r", PROMPT, readout=Readout(pooling="last")))
    driver.submit()
    result = driver.in_flight.popleft()
    broken = [ReadoutResult(r.slot, r.is_last, np.full(3, np.nan, np.float32)) for r in result.readout_results]
    object.__setattr__(result, "readout_results", tuple(broken))
    (event,) = driver.scheduler.apply(result)
    assert event.finish_reason == "abort" and event.readout is None
    assert event.error is not None and "NaN" in event.error
    driver.check_empty()


def test_a_readout_may_fill_the_context_and_needs_blocks_for_all_of_it() -> None:
    driver = make_driver(max_model_len=24, num_blocks=6)
    driver.add(make_request("fits", [*PROMPT, 1], readout=Readout(pooling="mean")))
    driver.drain()
    driver.check_answers()
    with pytest.raises(RequestError, match=r"context length is 24 tokens\..* your prompt has 25 tokens\. Please"):
        driver.add(make_request("long", [*PROMPT, 1, 2], readout=Readout(pooling="mean")))
    small = make_driver(max_model_len=24, num_blocks=5)
    with pytest.raises(RequestError, match="need 6 cache blocks") as refusal:
        small.add(make_request("wide", [*PROMPT, 1], readout=Readout(pooling="mean")))
    assert refusal.value.param == "prompt"
