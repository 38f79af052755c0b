"""When a sequence started, how often it was preempted, and how many tokens steps had."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from headrace.histogram import Histogram
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.sched.stats import TOKEN_GAP_BOUNDS
from headrace.types import Request, SamplingParams, SequenceEvent, SequenceTiming


class Run:
    """A scheduler on a fake runner, in which a step is planned at a full second and seen half a second later."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64} | limits
        self.scheduler = Scheduler(SchedulerLimits(block_size=4, **values), clock=lambda: self.now)
        self.runner = FakeRunner(max_num_seqs=values["max_num_seqs"])

    def add(self, name: str, *, first: int = 0, prompt_len: int = 4, watched: bool = True, **params: int) -> None:
        prompt = np.arange(first, first + prompt_len, dtype=np.int32)
        request = Request(name, prompt, SamplingParams(**params), watched=watched)  # type: ignore[arg-type]
        self.scheduler.add(request, seeds=tuple(range(request.params.n)), stop_token_ids=())

    def step(self) -> list[SequenceEvent]:
        plan = self.scheduler.plan()
        self.now += 0.5
        events = [] if plan is None else self.scheduler.apply(self.runner.submit(plan))
        self.now += 0.5
        return events

    def drain(self) -> list[SequenceEvent]:
        events = []
        while self.scheduler.has_unfinished:
            events += self.step()
        return events


def ends(events: list[SequenceEvent]) -> dict[tuple[str, int], SequenceTiming | None]:
    return {(event.request_id, event.index): event.timing for event in events if event.finish_reason}


def test_the_first_event_of_a_sequence_and_its_last_tell_its_times() -> None:
    run = Run()
    run.add("one", max_tokens=5)
    timings = [event.timing for event in run.drain()]
    assert timings == [SequenceTiming(0.0, 0.5), None, None, None, SequenceTiming(0.0, 0.5, 4.5)]


def test_an_unwatched_sequence_tells_them_at_its_end() -> None:
    run = Run()
    run.add("one", max_tokens=5, watched=False)
    assert [event.timing for event in run.drain()] == [SequenceTiming(0.0, 0.5, 4.5)]


def test_a_sequence_that_waits_for_a_slot_starts_later() -> None:
    run = Run(max_num_seqs=1)
    run.add("first", max_tokens=2)
    run.add("second", max_tokens=2)
    assert ends(run.drain()) == {
        ("first", 0): SequenceTiming(0.0, 0.5, 1.5),
        ("second", 0): SequenceTiming(2.0, 2.5, 3.5),
    }


def test_siblings_start_once_their_prompt_is_computed() -> None:
    run = Run()
    run.add("both", max_tokens=3, n=2)
    assert ends(run.drain()) == {("both", 0): SequenceTiming(0.0, 0.5, 2.5), ("both", 1): SequenceTiming(1.0, 1.5, 3.5)}


def test_what_was_aborted_in_the_queue_never_started() -> None:
    run = Run(max_num_seqs=1)
    run.add("first", max_tokens=9)
    run.add("second", max_tokens=9)
    run.step()
    assert ends(run.scheduler.abort("second")) == {("second", 0): SequenceTiming()}


def test_what_was_aborted_while_it_ran_had_its_last_token_before() -> None:
    run = Run()
    run.add("one", max_tokens=9)
    run.add("two", first=20, max_tokens=9)
    for _ in range(3):
        run.step()
    assert ends(run.scheduler.abort("one")) == {("one", 0): SequenceTiming(0.0, 0.5, 2.5)}


def preempting_run() -> Run:
    """Two that fit together at first but not in the end; both may end early, so both are started."""
    run = Run(num_blocks=5)
    for name, first in (("old", 0), ("young", 10)):
        prompt = np.arange(first, first + 4, dtype=np.int32)
        request = Request(name, prompt, SamplingParams(max_tokens=13, stop_token_ids=[40_000]), watched=True)
        run.scheduler.add(request, seeds=(first,), stop_token_ids=(40_000,))
    return run


def test_a_preempted_sequence_keeps_its_times_and_counts_its_preemptions() -> None:
    run = preempting_run()
    timings = ends(run.drain())
    assert run.scheduler.stats.num_preemptions == 1
    assert timings["old", 0] == SequenceTiming(0.0, 0.5, 12.5, 0)
    young = timings["young", 0]
    assert young is not None
    assert (young.started_at, young.first_token_at, young.num_preemptions) == (0.0, 0.5, 1)


def test_gaps_are_one_a_token_but_the_first_and_a_preemption_is_a_long_one() -> None:
    run = preempting_run()
    tokens_at: dict[str, list[float]] = {"old": [], "young": []}
    while run.scheduler.has_unfinished:
        for event in run.step():
            tokens_at[event.request_id] += [run.now] * len(event.token_ids)
    gaps = [b - a for times in tokens_at.values() for a, b in pairwise(times)]
    assert max(gaps) > 1.0
    counts = run.scheduler.stats.token_gaps
    assert counts.num_values == len(gaps) == 24
    assert counts.total == sum(gaps)
    assert counts.counts == tuple(counts_of(gaps))


def test_gaps_of_sequences_that_come_and_go_are_their_own() -> None:
    run = Run(max_num_seqs=3)
    tokens_at: dict[tuple[str, int], list[float]] = {}
    for number in range(12):
        run.add(f"{number}", first=7 * number, prompt_len=3 + number, max_tokens=1 + 5 * number % 7, n=1 + number % 2)
    while run.scheduler.has_unfinished:
        for event in run.step():
            tokens_at.setdefault((event.request_id, event.index), []).extend([run.now] * len(event.token_ids))
        run.now += 0.25 * (run.now % 3)  # steps of different lengths
    gaps = [b - a for times in tokens_at.values() for a, b in pairwise(times)]
    assert run.scheduler.stats.token_gaps.counts == tuple(counts_of(gaps))
    assert abs(run.scheduler.stats.token_gaps.total - sum(gaps)) < 1e-6


def counts_of(gaps: list[float]) -> list[int]:
    histogram = Histogram(TOKEN_GAP_BOUNDS)
    for gap in gaps:
        histogram.observe(gap)
    return histogram.counts


def test_the_tokens_of_each_step_are_counted() -> None:
    run = Run(max_num_batched_tokens=16)
    run.add("one", prompt_len=20, max_tokens=4)
    run.drain()
    stats = run.scheduler.stats
    assert stats.batch_tokens.counts[:4] == (3, 1, 1, 0)  # 3 tokens alone, 4 of the prompt, 16 of the prompt
    assert stats.batch_tokens.num_values == stats.num_steps
    assert stats.batch_tokens.total == stats.num_batched_tokens
