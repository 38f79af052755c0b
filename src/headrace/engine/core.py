"""The engine's step: plan, submit to the runner, apply the result of an earlier step. No torch, threads or text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.engine.adapters import AdapterStats, AdapterTable, Arrival
from headrace.engine.checks import RequestChecks
from headrace.engine.constraints import Constraints
from headrace.engine.grammars import Grammar, Grammars
from headrace.errors import AdapterError, RequestError
from headrace.histogram import Histogram, HistogramCounts
from headrace.kv.disk_tier import DiskTier
from headrace.sched import Scheduler, SchedulerStats
from headrace.sched.sequence import sequence_seed
from headrace.steps import HoldsAdapters, IntArray, LoadedAdapter, Runner, StepPlan, StepResult
from headrace.types import Request, SequenceEvent, StructuredOutputs, TokenIds

STEP_SECONDS_BOUNDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


FETCH_POLL_S = 0.01  # the longest wait for the disk; new requests wait as long
NO_TOKENS: TokenIds = np.empty(0, np.int32)
SAVE_S = 5.0  # for writing cached prefixes to the disk when the engine is closed


@dataclass(frozen=True, slots=True)
class EngineStats:
    scheduler: SchedulerStats
    host_seconds: float  # spent in planning, submitting and applying; the device waits no longer than this for the host
    wait_seconds: float  # spent waiting for the device
    steady_host_seconds: float = 0.0  # the part of `host_seconds` in steady steps (`StepPlan.is_steady`)
    num_steady_steps: int = 0
    # Of calls of `step` that applied a result, by STEP_SECONDS_BOUNDS: all of their time, and the host's part of it.
    step_seconds: HistogramCounts = field(default_factory=HistogramCounts)
    step_host_seconds: HistogramCounts = field(default_factory=HistogramCounts)
    started_at: float = 0.0  # `time.monotonic`; distinguishes an engine from its predecessor, whose counts are separate
    num_constrained: int = 0  # unfinished requests under a grammar
    adapters: AdapterStats | None = None  # None: the engine has no adapters


class StepTimes(NamedTuple):
    """When the parts of one call of `step` ended, by `perf_counter`."""

    started: float
    planned: float  # the plan is submitted
    collected: float  # the result of an earlier step has arrived, if one was due
    applied: float
    waited: float  # seconds before `planned` that were spent waiting for masks


# Called with the plan of a step, if there was one, and the context length of each of its slots after the step.
OnStep = Callable[[StepPlan | None, IntArray | None, StepTimes], None]


class InFlightStep:
    """A submitted step. Its result is collected at its first use. On a CPU two threads may ask at the same time and get
    the same result."""

    def __init__(self, runner: Runner, ticket: Any) -> None:
        self._runner = runner
        self._ticket = ticket
        self._result: StepResult | None = None

    @property
    def is_collected(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._runner.collect(self._ticket)
        return self._result


class EngineCore:
    """Owns a scheduler and a runner. Up to `depth` steps are submitted ahead of the last applied one."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
        generates: bool = True,
        seed: int = 0,
        depth: int = 1,
        grammars: Grammars | None = None,
        disk: DiskTier | None = None,
        max_loras: int = 0,
    ) -> None:
        """`disk`: that of the scheduler's tiers, which ends with the core. `max_loras`: room for adapters in the model;
        0: none."""
        self._adapters: AdapterTable | None = None
        if max_loras:
            assert isinstance(runner, HoldsAdapters)
            self._adapters = AdapterTable(max_loras, runner.write_adapter)
        self._scheduler = scheduler
        self._disk = disk
        self._grammars = grammars
        self._constraints = Constraints(grammars)
        self._constrained: dict[str, Grammar] = {}  # unfinished requests under a grammar
        self._runner = runner
        self.checks = RequestChecks(
            scheduler.limits, eos_token_ids, vocab_size, generates, takes_adapters=max_loras > 0
        )
        self.num_finished_steps = 0
        self.on_step: OnStep | None = None  # set while a profiler records (`engine/profiler.py`)
        self._random = np.random.default_rng(seed)
        self._depth = depth
        self._in_flight: deque[InFlightStep] = deque()
        self._host_seconds = 0.0
        self._wait_seconds = 0.0
        self._steady_host_seconds = 0.0
        self._num_steady_steps = 0
        self._step_seconds = Histogram(STEP_SECONDS_BOUNDS)
        self._step_host_seconds = Histogram(STEP_SECONDS_BOUNDS)
        self._started_at = monotonic()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight)

    @property
    def runner(self) -> Runner:
        return self._runner

    @property
    def num_constraints(self) -> int:
        """Running sequences under a grammar."""
        return len(self._constraints)

    @property
    def max_step_tokens(self) -> int:
        return self._scheduler.limits.max_num_batched_tokens

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler.stats
        if self._adapters is not None:
            scheduler.num_waiting += self._adapters.num_held_sequences
        return EngineStats(
            scheduler,
            self._host_seconds,
            self._wait_seconds,
            self._steady_host_seconds,
            self._num_steady_steps,
            self._step_seconds.snapshot(),
            self._step_host_seconds.snapshot(),
            self._started_at,
            len(self._constrained),
            self._adapter_stats(),
        )

    def _adapter_stats(self) -> AdapterStats | None:
        if self._adapters is None:
            return None
        scheduler = self._scheduler
        return self._adapters.stats(running=scheduler.slots.running_adapters(), waiting=scheduler.waiting_adapters)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run. Changes nothing, so any thread may call it."""
        self.checks.check(request)

    def grammar_of(self, request: Request) -> Grammar | None:
        """Compile the grammar of a request's answer, which may take a while; refuse an invalid one."""
        outputs = request.params.structured_outputs
        if outputs is None or request.readout is not None:
            return None
        assert isinstance(outputs, StructuredOutputs)
        if self._grammars is None:
            raise outputs.refused("this engine was started without grammars")
        stop_token_ids = self.checks.stop_token_ids(request)
        if not outputs.is_any and not any(token < self._grammars.vocab_size for token in stop_token_ids):
            raise outputs.refused(
                "the answer could not end: no token ends it; leave out ignore_eos or give stop_token_ids"
            )
        return self._grammars.compile(outputs)

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request that `check` has passed; `grammar` is the result of `grammar_of`, if it was asked before."""
        grammar = grammar or self.grammar_of(request)
        params = request.params
        seed = request.seed if params.seed is None else params.seed
        if seed is None:
            seed = int(self._random.integers(2**63))
        seeds = tuple(sequence_seed(seed, index) for index in range(params.num_sequences))
        self._check_id(request.request_id)
        arrival = Arrival(request, seeds, grammar)
        if self._adapters is None or request.adapter is None:
            self._start(arrival, None)
        else:
            self._scheduler.limits.check(request)  # now, since it may start much later
            self._adapters.hold(arrival)
            self._start_held()

    def _check_id(self, request_id: str) -> None:
        is_held = self._adapters is not None and self._adapters.is_held(request_id)
        if is_held or self._scheduler.is_unfinished(request_id):
            raise RequestError(f"request id {request_id!r} is already running", param="request_id")

    def _start_held(self) -> None:
        """Queue the requests whose adapters have a place now."""
        assert self._adapters is not None
        for arrival, adapter in self._adapters.start():
            self._start(arrival, adapter)

    def _start(self, arrival: Arrival, adapter: LoadedAdapter | None) -> None:
        request = arrival.request
        stops = self.checks.stop_token_ids(request)
        self._scheduler.add(request, seeds=arrival.seeds, stop_token_ids=stops, adapter=adapter)
        if arrival.grammar is not None:
            self._constrained[request.request_id] = arrival.grammar

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """End a request, or one of its sequences. One that waits for its adapter ends with all of its sequences."""
        if self._adapters is not None and self._adapters.is_held(request_id):
            num_sequences = len(self._adapters.drop_held(request_id).seeds)
            self._start_held()  # others may have waited behind it
            return [SequenceEvent(request_id, each, NO_TOKENS, "abort") for each in range(num_sequences)]
        return self._without_ended(self._scheduler.abort(request_id, index))

    def read_adapter(self, path: str) -> Any:
        """Read an adapter for `load_adapter`. Changes nothing, so any thread may call it."""
        self._adapter_table()
        assert isinstance(self._runner, HoldsAdapters)
        return self._runner.read_adapter(path)

    def load_adapter(self, name: str, adapter: Any, *, replaces: bool = False) -> None:
        """Let requests use an adapter that `read_adapter` has returned. `replaces`: one of the same name."""
        self._adapter_table().load(name, adapter, replaces=replaces)

    def unload_adapter(self, name: str) -> None:
        """Refuse later requests with this adapter. Requests that have it go on; then its place is free."""
        self._adapter_table().unload(name)

    def _adapter_table(self) -> AdapterTable:
        if self._adapters is None:
            raise AdapterError("this engine has no room for adapters; start it with --enable-lora")
        return self._adapters

    def limit_running(self, num_seqs: int | None) -> list[SequenceEvent]:
        """Start sequences only while fewer than `num_seqs` run; None: as many as there are slots."""
        limits = self._scheduler.limits
        self._scheduler.max_running = limits.max_num_seqs if num_seqs is None else min(num_seqs, limits.max_num_seqs)
        return []

    def forget_prefixes(self) -> list[SequenceEvent]:
        self._scheduler.tables.pool.forget_idle()
        return []

    def step(self) -> list[SequenceEvent]:
        """Submit the next step, then apply an earlier one while the device works."""
        started = perf_counter()
        plan = self._scheduler.plan()
        waited = 0.0
        if plan is not None:
            waited = self._submit(plan)
        planned = perf_counter()
        self._host_seconds += planned - started - waited
        self._wait_seconds += waited
        results = self._due_results(plan)
        if plan is None and not results:
            self._scheduler.tables.wait_for_fetch(FETCH_POLL_S)  # there is nothing to compute until then
        if not results:
            if self.on_step is not None:
                self._observe(plan, StepTimes(started, planned, planned, planned, waited))
            return []
        collected = perf_counter()
        self.num_finished_steps += 1
        self._wait_seconds += collected - planned
        events = [event for result in results for event in self._apply(result)]
        applied = perf_counter()
        self._host_seconds += applied - collected
        host_seconds = (planned - started - waited) + (applied - collected)
        self._step_seconds.observe(applied - started)
        self._step_host_seconds.observe(host_seconds)
        if plan is not None and plan.is_steady:
            self._steady_host_seconds += host_seconds
            self._num_steady_steps += 1
        if self.on_step is not None:
            self._observe(plan, StepTimes(started, planned, collected, applied, waited))
        return events

    def _observe(self, plan: StepPlan | None, times: StepTimes) -> None:
        assert self.on_step is not None
        self.on_step(plan, None if plan is None else self._scheduler.slots.computed[plan.slots], times)

    def _due_results(self, plan: StepPlan | None) -> list[StepResult]:
        """The result of the oldest step, if enough others are in flight or nothing is left to plan, and all results
        that masks have already waited for."""
        results = []
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            results.append(self._in_flight.popleft().result())
        while self._in_flight and self._in_flight[0].is_collected:
            results.append(self._in_flight.popleft().result())
        return results

    def _submit(self, plan: StepPlan) -> float:
        """Submit a plan; returns the seconds spent waiting for earlier steps, whose tokens its masks need."""
        self._constrain(plan)
        masks = self._constraints.masks(plan) if len(self._constraints) else None
        if masks is None:
            self._in_flight.append(InFlightStep(self._runner, self._runner.submit(plan)))
            return 0.0
        step = InFlightStep(self._runner, self._runner.submit(plan, masks))
        masks.result = step.result
        self._in_flight.append(step)
        return masks.waited_seconds

    def _constrain(self, plan: StepPlan) -> None:
        """Give sequences under a grammar that enter a slot their constraints."""
        if not self._constrained and not len(self._constraints):
            return
        for entry in plan.slot_entries:
            sequence = self._scheduler.slots.sequences[entry.slot]
            assert sequence is not None
            request_id = sequence.request.request_id
            self._constraints.enter(entry, (request_id, sequence.index), self._constrained.get(request_id))

    def _apply(self, result: StepResult) -> list[SequenceEvent]:
        return self._without_ended(self._scheduler.apply(result))

    def _without_ended(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        """Drop the constraints of ended sequences; returns the events, with the reason if a grammar caused an error."""
        if self._adapters is not None and self._adapters.has_requests:
            self._release_adapters(events)
        if not self._constrained:
            return events
        return [event if event.finish_reason is None else self._explained(event) for event in events]

    def _release_adapters(self, events: list[SequenceEvent]) -> None:
        assert self._adapters is not None
        for event in events:
            if event.finish_reason is not None and not self._scheduler.is_unfinished(event.request_id):
                self._adapters.ended(event.request_id)
        if self._adapters.has_held:
            self._start_held()

    def _explained(self, event: SequenceEvent) -> SequenceEvent:
        constraint = self._constraints.end((event.request_id, event.index))
        if not self._scheduler.is_unfinished(event.request_id):
            self._constrained.pop(event.request_id, None)
        if constraint is None or constraint.error is None or event.error is None:
            return event
        return msgspec.structs.replace(event, error=constraint.error)

    def close(self) -> None:
        try:
            while self._in_flight:
                self._in_flight.popleft().result()
            if self._disk is not None:
                self._save_prefixes(self._disk)
        finally:
            if self._disk is not None:
                self._disk.close()
        self._runner.close()

    def _save_prefixes(self, disk: DiskTier) -> None:
        """Write the cached prefixes to the disk, the most recently used first, as far as that takes no longer than
        SAVE_S: the next start finds them."""
        deadline = monotonic() + SAVE_S
        while monotonic() < deadline and (plan := self._scheduler.plan_saving()) is not None:
            self._runner.collect(self._runner.submit(plan))
            disk.flush(max(0.0, deadline - monotonic()))
        while monotonic() < deadline and self._scheduler.tables.is_saving():
            disk.flush(max(0.0, deadline - monotonic()))
