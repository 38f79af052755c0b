"""The engine core with grammars, on a runner without a model: answers match them however many steps run ahead."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

from headrace.engine.constraints import StepMasks
from headrace.engine.core import EngineCore
from headrace.engine.grammars import Grammars
from headrace.errors import RequestError
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import Masks, StepPlan, StepResult
from headrace.types import Request, SamplingParams, SequenceEvent
from tests.text.builders import byte_tokenizer

EOS = 256
TOKENIZER = byte_tokenizer(["ab", "abc", "bcd", "12"])
GRAMMARS = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS,))
REGEXES = ["[a-d]{5,30}[0-9]", "(ab|bc|cd){1,12}!", "x?[0-9]{1,20}", "[a-z]{25}"]
ROOMY = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, num_blocks=200, block_size=4)
TIGHT = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=8, max_model_len=64, num_blocks=24, block_size=4)


class WatchedRunner(FakeRunner):
    """Records which steps had masks, and which results were collected for them."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=6, vocab_size=TOKENIZER.vocab_size)
        self.collected: list[int] = []
        self.waits: dict[int, list[int]] = {}  # step with masks -> steps that were collected while it was submitted
        self.masks: list[StepMasks] = []

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        before = len(self.collected)
        result = super().submit(plan, masks)
        if masks is not None:
            assert isinstance(masks, StepMasks)
            self.masks.append(masks)
            self.waits[plan.step] = self.collected[before:]
        else:
            assert len(self.collected) == before
        return result

    def collect(self, ticket: StepResult) -> StepResult:
        self.collected.append(ticket.step)
        return ticket


def make_core(runner: FakeRunner | None = None, limits: SchedulerLimits = ROOMY, depth: int = 2) -> EngineCore:
    return EngineCore(
        Scheduler(limits),
        runner or WatchedRunner(),
        eos_token_ids=(EOS,),
        vocab_size=TOKENIZER.vocab_size,
        depth=depth,
        grammars=GRAMMARS,
    )


def make_request(request_id: str, prompt_len: int = 9, regex: str | None = None, **params: Any) -> Request:
    outputs = None if regex is None else {"regex": regex}
    params = {"max_tokens": 40, "seed": 1, **params}
    prompt = np.arange(97, 97 + prompt_len, dtype=np.int32)
    return Request(request_id, prompt, SamplingParams(structured_outputs=outputs, **params))


def run(core: EngineCore) -> dict[tuple[str, int], SequenceEvent]:
    events: list[SequenceEvent] = []
    while core.has_work:
        events += core.step()
    return {(event.request_id, event.index): event for event in events}


def text_of(event: SequenceEvent) -> str:
    assert event.finish_reason == "stop", event
    return TOKENIZER.decode(event.token_ids.tolist())


def mixed_requests() -> list[Request]:
    return [
        make_request(
            f"{i}", 1 + i, REGEXES[i % 4] if i % 3 else None, seed=i, n=1 + i % 2, max_tokens=40 if i % 3 else 20
        )
        for i in range(14)
    ]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("limits", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_answers_keep_to_their_grammars_however_far_the_engine_runs_ahead(limits: SchedulerLimits, depth: int) -> None:
    plain = make_core(depth=0)
    core = make_core(limits=limits, depth=depth)
    for engine in (plain, core):
        for request in mixed_requests():
            engine.add(request)
    expected, found = run(plain), run(core)
    assert {key: event.token_ids.tolist() for key, event in found.items()} == {
        key: event.token_ids.tolist() for key, event in expected.items()
    }
    for (request_id, _), event in found.items():
        number = int(request_id)
        if number % 3:
            assert re.fullmatch(REGEXES[number % 4], text_of(event))
        else:
            assert len(event.token_ids) == 20 or event.token_ids[-1] == EOS
    assert limits is ROOMY or core.stats.scheduler.num_preemptions > 0
    assert_empty(core)


def assert_empty(core: EngineCore) -> None:
    assert core.stats.num_constrained == 0
    assert core.num_constraints == 0


def test_steps_without_a_grammar_wait_for_nothing_and_get_no_masks() -> None:
    runner = WatchedRunner()
    core = make_core(runner)
    core.add(make_request("free"))
    run(core)
    assert not runner.waits


def test_a_step_with_masks_waits_for_the_one_before_and_no_other() -> None:
    runner = WatchedRunner()
    core = make_core(runner, depth=2)
    core.add(make_request("bound", regex="[a-z]{10}"))
    run(core)
    assert runner.waits[0] == []
    assert all(runner.waits[step] == [step - 1] for step in range(1, len(runner.waits)))
    assert len(runner.waits) > 4
    assert sorted(set(runner.collected)) == list(range(max(runner.collected) + 1))


def test_results_that_were_waited_for_are_taken_in_at_once() -> None:
    core = make_core(depth=2)
    core.add(Request("w", np.arange(5, dtype=np.int32), make_request("w", regex="[a-z]{6}").params, watched=True))
    core.step()
    for _ in range(4):
        (event,) = core.step()  # the token of the step before: results are not held back for `depth`
        assert len(event.token_ids) == 1


def test_only_slots_that_sample_under_a_grammar_have_masks() -> None:
    runner = WatchedRunner()
    core = make_core(runner, limits=TIGHT)
    core.add(make_request("free", 3, max_tokens=30))
    core.add(make_request("bound", 30, regex="[a-z]{4}", max_tokens=10))  # its prompt takes some steps
    run(core)
    assert min(runner.waits) > 2
    assert all(len(masks.slots) == 1 for masks in runner.masks)


def test_masks_of_earlier_steps_are_freed() -> None:
    runner = WatchedRunner()
    core = make_core(runner)
    core.add(make_request("bound", regex="[a-z]{30}"))
    for _ in range(20):
        core.step()
    assert len(runner.masks) > 10
    runner.masks.clear()
    gc.collect()
    assert sum(type(each) is StepMasks for each in gc.get_objects()) <= 3  # a step and those in flight


@pytest.mark.parametrize("index", [None, 1])
def test_an_aborted_sequence_leaves_nothing_behind(index: int | None) -> None:
    core = make_core()
    core.add(make_request("one", regex="[a-z]{35}", n=3))
    for _ in range(6):
        core.step()
    assert core.num_constraints == 3
    core.abort("one", index)
    assert core.num_constraints == (0 if index is None else 2)
    events = run(core)
    assert_empty(core)
    assert len(events) == (0 if index is None else 2)


def test_a_request_aborted_before_it_starts_leaves_nothing_behind() -> None:
    core = make_core()
    core.add(make_request("one", regex="[a-z]{35}"))
    core.abort("one")
    assert_empty(core)


def test_the_next_owner_of_a_slot_is_free_of_its_grammar() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, num_blocks=40, block_size=4)
    alone, after = make_core(limits=limits), make_core(limits=limits)
    after.add(make_request("bound", regex="[a-z]{5}"))
    for core in (alone, after):
        core.add(make_request("free", seed=5, ignore_eos=True))
    assert run(alone)["free", 0].token_ids.tolist() == run(after)["free", 0].token_ids.tolist()


def test_the_end_may_be_any_token_that_ends_the_sequence() -> None:
    core = make_core()
    core.add(make_request("own", regex="[a-z]{3}", stop_token_ids=[257], ignore_eos=True))
    core.add(make_request("both", regex="[a-z]{3}", stop_token_ids=[257, 10**6], n=20))
    events = run(core)
    assert events["own", 0].token_ids[-1] == 257
    assert {int(events["both", i].token_ids[-1]) for i in range(20)} == {EOS, 257}
    with pytest.raises(RequestError, match="could not end"):
        core.add(make_request("endless", regex="[a-z]{3}", ignore_eos=True))


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_ends_before_min_tokens_unless_it_is_complete(seed: int) -> None:
    core = make_core()
    core.add(make_request("long", regex="[a-z0-9]*", min_tokens=12, seed=seed))
    core.add(make_request("own stop", regex="[a-c]*", min_tokens=12, seed=seed, stop_token_ids=[98]))
    core.add(make_request("complete", regex="abc", min_tokens=12, seed=seed))
    events = run(core)
    assert len(events["long", 0].token_ids) > 12
    assert len(events["own stop", 0].token_ids) > 12
    assert text_of(events["complete", 0]) == "abc"


def test_an_engine_without_grammars_refuses_them() -> None:
    core = EngineCore(Scheduler(ROOMY), WatchedRunner(), eos_token_ids=(EOS,))
    with pytest.raises(RequestError, match="grammars"):
        core.add(make_request("one", regex="a"))


def test_a_grammar_refused_is_refused_before_it_is_queued() -> None:
    core = make_core()
    with pytest.raises(RequestError, match="unclosed"):
        core.grammar_of(make_request("one", regex="a(b"))
    assert not core.has_work
