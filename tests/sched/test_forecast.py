"""The forecast of what running sequences will hold, and which sequences start because of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.sched.forecast import MIN_FINISHED, Forecast
from headrace.sched.limits import SchedulerLimits
from headrace.sched.sequence import Sequence
from headrace.sched.slots import SlotTable
from headrace.steps import STOPPED, UNFINISHED, Masks, StepPlan, StepResult
from headrace.types import Request, SamplingParams


def sequence(prompt_len: int, end_len: int, *, stops: bool = False, known: int | None = None) -> Sequence:
    request = Request("r", np.arange(prompt_len, dtype=np.int32), SamplingParams(max_tokens=end_len - prompt_len))
    return Sequence(
        request=request,
        index=0,
        seed=0,
        arrival=0,
        end_len=end_len,
        stop_token_ids=(2,) if stops else (),
        token_ids=np.zeros(known or prompt_len, np.int32),
    )


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_the_peak_is_what_a_run_to_the_end_would_see(
    running: list[tuple[int, int, int]], new_len: int, new_rest: int
) -> None:
    slots = SlotTable(8, 100)
    for length, rest, cached in running:
        one = sequence(length, length + rest)
        slots.occupy(one, step=0, num_computed=min(cached, length), capacity=length)
    held = 1000
    everyone = [(n, rest, min(cached, n)) for n, rest, cached in running] + [(new_len, new_rest, 0)]
    seen = [
        held + sum(time if rest >= time else cached - n for n, rest, cached in everyone)
        for time in range(max(rest for _, rest, _ in everyone) + 1)
    ]
    candidate = sequence(new_len, new_len + new_rest)
    assert Forecast().peak_tokens(slots, candidate, num_held=held) == max(seen)


def test_answers_of_unknown_length_count_as_they_are_until_some_have_ended() -> None:
    forecast, slots = Forecast(), SlotTable(2, 100)
    slots.occupy(sequence(10, 90, stops=True), step=0, num_computed=0, capacity=16)
    candidate = sequence(10, 90, stops=True)
    assert forecast.peak_tokens(slots, candidate, num_held=20) == 20
    for _ in range(MIN_FINISHED):
        forecast.learn(20, 80)
    assert forecast.share == 0.25
    assert forecast.peak_tokens(slots, candidate, num_held=20) == 20 + 2 * 20


def scheduler(num_blocks: int) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=8, max_num_batched_tokens=200, max_model_len=100, num_blocks=num_blocks, block_size=4
        )
    )


def run(target: Scheduler, *, ends_at: int | None = None) -> None:
    """To the end; answers stop by themselves at `ends_at` tokens in all."""
    for _ in range(2000):
        plan = target.plan()
        if plan is None:
            assert not target.has_unfinished
            return
        sampling = plan.slots[plan.samples]
        lens = target.slots.known[sampling] + 1
        finished = np.where(lens == ends_at, STOPPED, UNFINISHED).astype(np.uint8)
        target.apply(StepResult(plan.step, sampling, np.full(len(sampling), 9, np.int64), finished))
    raise AssertionError("it does not come to an end")


def add(target: Scheduler, count: int, *, first: int = 0, stops: bool = False) -> None:
    for number in range(first, first + count):
        prompt = np.full(8, 100 + number, np.int32)
        request = Request(f"{number}", prompt, SamplingParams(max_tokens=40, ignore_eos=not stops))
        target.add(request, seeds=(0,), stop_token_ids=(2,) if stops else ())


def test_answers_of_known_length_are_never_preempted() -> None:
    target = scheduler(num_blocks=40)  # three of twelve blocks each, and a little
    add(target, 8)
    run(target)
    assert target.stats.num_finished == 8
    assert target.stats.num_preemptions == 0


def test_answers_of_unknown_length_start_as_long_as_there_is_room() -> None:
    target = scheduler(num_blocks=40)
    add(target, 8, stops=True)
    target.plan()
    assert target.slots.num_running == 8


def test_finished_answers_tell_how_many_sequences_fit() -> None:
    target = scheduler(num_blocks=40)
    add(target, 3 * MIN_FINISHED, stops=True)
    run(target)  # all reach their limits, which is not known in advance: some are preempted
    first = target.stats.num_preemptions
    assert first > 0
    add(target, 3 * MIN_FINISHED, first=1000, stops=True)
    run(target)
    assert target.stats.num_preemptions == first


def steps_and_tokens(lengths: list[int], *, are_known: bool) -> tuple[int, int]:
    """Of a cache that is full nearly all the time: answers of these lengths, which are known, or limits eight times
    their mean."""
    limits = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=400, num_blocks=180)
    target, runner = Scheduler(limits), EndsAt(max_num_seqs=64)
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length if are_known else 256, ignore_eos=are_known)
        request = Request(f"{number}", np.full(48, number, np.int32), params)
        target.add(request, seeds=(length,), stop_token_ids=() if are_known else (-1,))
    while (plan := target.plan()) is not None:
        target.apply(runner.submit(plan))
    assert target.stats.num_finished == len(lengths)
    return target.stats.num_steps, target.stats.num_batched_tokens


class EndsAt(FakeRunner):
    """Ends each answer at the length that is its seed."""

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        result = super().submit(plan, masks)
        num_sampled = self._len[result.slots] - 48
        result.finished[num_sampled >= self._seed[result.slots].astype(np.int64)] = STOPPED
        return result


def test_not_knowing_the_lengths_costs_few_steps_and_little_recomputing() -> None:
    lengths = np.minimum(np.random.default_rng(1).geometric(1 / 32, 600), 256).tolist()
    known, unknown = (steps_and_tokens(lengths, are_known=are_known) for are_known in (True, False))
    assert unknown[0] <= 1.05 * known[0]
    assert unknown[1] <= 1.05 * known[1]
