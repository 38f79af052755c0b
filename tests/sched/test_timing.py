"""When a sequence started, how often it gave way, and what steps were made of."""

from __future__ import annotations

from itertools import count

import numpy as np

from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.types import Request, SamplingParams, SequenceEvent, SequenceTiming


class Run:
    """A scheduler whose clock moves by one with each look at it, on a fake runner."""

    def __init__(self, **limits: int) -> None:
        self.looks = count()
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64} | limits
        self.scheduler = Scheduler(SchedulerLimits(block_size=4, **values), clock=lambda: float(next(self.looks)))
        self.runner = FakeRunner(max_num_seqs=values["max_num_seqs"])

    def add(self, name: str, *, first: int = 0, prompt_len: int = 4, watched: bool = True, **params: int) -> None:
        prompt = np.arange(first, first + prompt_len, dtype=np.int32)
        request = Request(name, prompt, SamplingParams(**params), watched=watched)  # type: ignore[arg-type]
        self.scheduler.add(request, seeds=tuple(range(request.params.n)), stop_token_ids=())

    def turn(self) -> list[SequenceEvent]:
        plan = self.scheduler.plan()
        return [] if plan is None else self.scheduler.apply(self.runner.submit(plan))

    def drain(self) -> list[SequenceEvent]:
        events = []
        while self.scheduler.has_unfinished:
            events += self.turn()
        return events


def test_the_first_event_and_the_last_say_when_a_sequence_started() -> None:
    run = Run()
    run.add("one", max_tokens=5)
    timings = [event.timing for event in run.drain()]
    assert timings == [SequenceTiming(0.0), None, None, None, SequenceTiming(0.0)]


def test_an_unwatched_sequence_says_it_at_its_end() -> None:
    run = Run()
    run.add("one", max_tokens=5, watched=False)
    assert [event.timing for event in run.drain()] == [SequenceTiming(0.0)]


def test_one_that_waits_for_a_row_starts_later() -> None:
    run = Run(max_num_seqs=1)
    run.add("first", max_tokens=2)
    run.add("second", max_tokens=2)
    ends = {event.request_id: event.timing for event in run.drain() if event.finish_reason}
    assert ends == {"first": SequenceTiming(0.0), "second": SequenceTiming(1.0)}


def test_the_clock_is_read_once_a_sequence_and_never_in_a_steady_step() -> None:
    run = Run()
    run.add("one", max_tokens=20, n=3)
    run.drain()
    assert next(run.looks) == 3


def test_what_was_aborted_in_the_queue_never_started() -> None:
    run = Run(max_num_seqs=1)
    run.add("first", max_tokens=9)
    run.add("second", max_tokens=9)
    run.turn()
    (event,) = run.scheduler.abort("second")
    assert event.timing == SequenceTiming(None)


def test_a_preempted_sequence_keeps_its_start_and_counts_its_preemptions() -> None:
    run = Run(num_blocks=5)
    for name, first in (("old", 0), ("young", 10)):
        prompt = np.arange(first, first + 4, dtype=np.int32)
        request = Request(name, prompt, SamplingParams(max_tokens=13, stop_token_ids=[40_000]), watched=True)
        run.scheduler.add(request, seeds=(first,), stop_token_ids=(40_000,))  # may end early: both are let in
    ends = {event.request_id: event.timing for event in run.drain() if event.finish_reason}
    assert run.scheduler.stats.num_preemptions == 1
    assert ends == {"old": SequenceTiming(0.0, 0), "young": SequenceTiming(1.0, 1)}


def test_the_tokens_of_each_step_are_counted() -> None:
    run = Run(max_num_batched_tokens=16)
    run.add("one", prompt_len=20, max_tokens=4)
    run.drain()
    stats = run.scheduler.stats
    assert stats.batch_tokens.counts[:4] == (3, 1, 1, 0)  # 3 tokens alone, 4 of the prompt, 16 of the prompt
    assert stats.batch_tokens.num_values == stats.num_steps
    assert stats.batch_tokens.total == stats.num_batched_tokens
