"""More LoRA adapters than the device has room for: they wait in host memory, and their requests for a place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.adapters import AdapterStats
from headrace.engine.core import EngineCore
from headrace.errors import AdapterError, RequestError
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import Masks, StepPlan, StepResult
from headrace.types import Request, SamplingParams, SequenceEvent

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_blocks=64, block_size=4)
NAMES = "abcdef"


class AdapterRunner(FakeRunner):
    """Its weights are names. Notes which of them each request has used, by the first token of its prompt."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=LIMITS.max_num_seqs)
        self.table: dict[int, str] = {}
        self.num_writes = 0
        self.used: dict[int, str | None] = {}
        self._slots: dict[int, tuple[int, int]] = {}  # the first token and the index of the adapter of each slot

    def read_adapter(self, path: str) -> str:
        return path

    def write_adapter(self, index: int, adapter: str) -> None:
        self.num_writes += 1
        self.table[index] = adapter

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        for entry in plan.slot_entries:
            self._slots[entry.slot] = int(entry.token_ids[0]), entry.adapter
        for first, adapter in (self._slots[slot] for slot in plan.slots.tolist()):
            weights = self.table[adapter - 1] if adapter else None
            assert self.used.setdefault(first, weights) == weights, "its adapter was replaced while it ran"
        return super().submit(plan, masks)


class Engine:
    """A core with adapters named by letters, `max_loras` of which fit on the device."""

    def __init__(self, names: str, max_loras: int) -> None:
        self.runner = AdapterRunner()
        self.core = EngineCore(Scheduler(LIMITS), self.runner, max_loras=max_loras)
        self.events: list[SequenceEvent] = []
        self.num_requests = 0
        for name in names:
            self.load(name)

    def load(self, name: str, weights: str | None = None) -> None:
        self.core.load_adapter(name, weights or name, replaces=weights is not None)

    def add(self, name: str | None, *, max_tokens: int = 4, n: int = 1, first: int | None = None) -> str:
        """`first`: the first token of the prompt, if it is not the request's number."""
        number = self.num_requests
        prompt = np.array([number if first is None else first, *range(5)], np.int32)
        params = SamplingParams(max_tokens=max_tokens, n=n, temperature=1.0)
        request = Request(f"{number}", prompt, params, adapter=name)
        self.core.add(request)
        self.num_requests += 1
        return request.request_id

    def run(self, *, until: str | None = None) -> None:
        while self.core.has_work and until not in self.ended:
            self.events += self.core.step()

    @property
    def ended(self) -> list[str]:
        return [event.request_id for event in self.events if event.finish_reason is not None]

    @property
    def adapters(self) -> AdapterStats:
        found = self.core.stats.adapters
        assert found is not None
        return found


def test_an_adapter_beyond_max_loras_stays_in_host_memory_until_a_request_needs_it() -> None:
    engine = Engine("abc", max_loras=2)
    assert (engine.adapters.loaded, engine.adapters.resident) == (("a", "b", "c"), ("a", "b"))
    engine.add("c")
    engine.run()
    assert engine.runner.used == {0: "c"}
    assert set(engine.adapters.resident) == {"b", "c"}


def test_the_adapter_that_was_used_longest_ago_gives_its_place() -> None:
    engine = Engine("abc", max_loras=2)
    for name in "abac":
        engine.add(name)
        engine.run()
    assert set(engine.adapters.resident) == {"a", "c"}


def test_an_adapter_with_a_place_is_not_copied_again() -> None:
    engine = Engine("abc", max_loras=2)
    for name in "abab":
        engine.add(name)
        engine.run()
    assert engine.runner.num_writes == 2


def test_an_adapter_that_comes_back_finds_its_cached_prefixes() -> None:
    engine = Engine("ab", max_loras=1)
    for name in "aba":
        engine.add(name, first=ord(name))
        engine.run()
    cached = [event.num_cached_tokens for event in engine.events if event.finish_reason is not None]
    assert cached == [0, 0, LIMITS.block_size]


def test_a_request_waits_while_all_places_are_used_and_counts_as_waiting() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a")
    waiting = engine.add("b", n=3)
    engine.events += engine.core.step()
    stats = engine.core.stats
    assert (stats.scheduler.num_running, stats.scheduler.num_waiting) == (1, 3)
    assert (engine.adapters.running, engine.adapters.waiting) == (("a",), ("b",))
    engine.run()
    assert engine.ended == ["0", *[waiting] * 3]
    assert engine.core.stats.scheduler.num_waiting == 0


def test_requests_without_an_adapter_do_not_wait_for_one() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a", max_tokens=20)
    engine.add("b")
    engine.add(None)
    engine.run()
    assert engine.ended == ["2", "0", "1"]


def test_a_busy_adapter_cannot_keep_its_place_for_ever() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a")
    wanted = engine.add("b")
    for _ in range(30):
        engine.add("a")
        engine.events += engine.core.step()
    assert wanted in engine.ended


def test_only_the_least_used_place_takes_no_new_requests() -> None:
    engine = Engine("abc", max_loras=2)
    engine.add("a", max_tokens=20)
    engine.add("a", max_tokens=20)
    engine.add("b", max_tokens=20)
    engine.add("c")
    taken, kept_back = engine.add("a"), engine.add("b")
    engine.run(until=taken)
    engine.run()
    assert engine.ended.index(taken) < engine.ended.index("3") < engine.ended.index(kept_back)


def test_a_held_request_can_be_aborted_and_those_behind_it_go_on() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a", max_tokens=20)
    held = engine.add("b", n=2)
    behind = engine.add("a", max_tokens=2)
    events = engine.core.abort(held)
    assert [(event.index, event.finish_reason) for event in events] == [(0, "abort"), (1, "abort")]
    engine.run(until=behind)
    assert engine.ended == [behind]
    engine.run()
    assert len(engine.ended) == 2


def test_an_adapter_that_is_unloaded_answers_its_held_requests() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a")
    held = engine.add("b")
    engine.core.unload_adapter("b")
    with pytest.raises(RequestError, match="'b' is not loaded"):
        engine.add("b")
    engine.run()
    assert held in engine.ended and engine.runner.used == {0: "a", 1: "b"}
    assert engine.adapters.resident == ()


def test_a_replaced_adapter_answers_the_requests_that_came_before() -> None:
    engine = Engine("a", max_loras=1)
    engine.add("a")
    engine.load("a", "newer")
    engine.add("a")
    engine.run()
    assert engine.runner.used == {0: "a", 1: "newer"}
    with pytest.raises(AdapterError, match="already been loaded"):
        engine.load("a")


def test_the_id_of_a_held_request_is_taken() -> None:
    engine = Engine("ab", max_loras=1)
    engine.add("a")
    engine.add("b")
    engine.num_requests -= 1
    with pytest.raises(RequestError, match="already running"):
        engine.add("b")
    with pytest.raises(RequestError, match="already running"):
        engine.add(None)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([*NAMES, None]), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("replace"), st.sampled_from(NAMES)),
    st.tuples(st.just("step")),
)


@pytest.mark.properties
@given(actions=st.lists(ACTIONS, max_size=60), max_loras=st.integers(1, 4))
def test_every_request_ends_with_its_own_adapter(actions: list[tuple[object, ...]], max_loras: int) -> None:
    engine = Engine(NAMES, max_loras)
    current: dict[str | None, str | None] = {name: name for name in [*NAMES, None]}
    expected: dict[int, str | None] = {}
    for number, (action, *values) in enumerate(actions):
        match action, values:
            case "add", [name, max_tokens]:
                expected[engine.num_requests] = current[name]
                engine.add(name, max_tokens=max_tokens)
            case "abort", [request]:
                engine.events += engine.core.abort(f"{request}")
            case "replace", [name]:
                current[name] = f"{name}{number}"
                engine.load(name, current[name])
            case _:
                engine.events += engine.core.step()
        assert len(engine.adapters.resident) <= max_loras
    engine.run()
    assert sorted(engine.ended, key=int) == [f"{request}" for request in expected]
    assert engine.runner.used.items() <= expected.items()
    assert engine.core.stats.scheduler.num_waiting == 0
