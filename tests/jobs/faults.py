"""An engine that fails on purpose: which lines kill it, at which steps, and with which error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.restart_policy import JOB_RESTARTS
from headrace.engine.start import Engine
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.runner.fake import FakeRunner
from headrace.steps import Masks, StepPlan, StepResult
from headrace.types import Request, SequenceEvent
from tests.jobs.conftest import ASCII

MARK = ord("!")  # a prompt with it kills the engine
AT_ONCE = RetryRules(restarts=replace(JOB_RESTARTS, first_delay_s=0.0))


class OutOfMemoryError(RuntimeError):
    """As torch's, by name."""


class FaultyRunner(FakeRunner):
    """Dies at some steps (counted over all its engines), and whenever a prompt with the mark enters a slot."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        dies_at: Collection[int] = (),
        always: bool = False,
        error: Callable[[], BaseException] = lambda: RuntimeError("the device is gone"),
        is_poison: bool = True,
        kills_process: bool = False,
    ) -> None:
        super().__init__(max_num_seqs=max_num_seqs, vocab_size=ASCII)
        self._dies_at = set(dies_at)
        self._always = always
        self._error = error
        self._is_poison = is_poison
        self._kills_process = kills_process
        self.num_deaths = 0

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        is_marked = self._is_poison and any(MARK in entry.token_ids for entry in plan.slot_entries)
        if is_marked and self._kills_process:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_marked or self._always or self.num_steps in self._dies_at:
            self._dies_at.discard(self.num_steps)
            self.num_deaths += 1
            raise self._error()
        return super().submit(plan, masks)


class FaultyStart:
    """Starts engines one after the other on one runner. Records what was submitted."""

    def __init__(self, start: Callable[..., Engine], runner: FaultyRunner, *, fails: Iterable[str] = ()) -> None:
        """`fails` are ids of lines whose first attempts end in an error, once for each time that they are named."""
        self._start = start
        self._runner = runner
        self._fails = list(fails)
        self.configs: list[EngineConfig] = []
        self.submitted: list[list[str]] = []  # by engine

    def __call__(self, config: EngineConfig, deliver: Deliver) -> Engine:
        self.configs.append(config)
        ids: list[str] = []
        self.submitted.append(ids)
        engine = self._start(config, lambda events: deliver(self._spoil(events)), runner=self._runner)
        submit = engine.client.submit

        def record(request: Request) -> None:
            ids.append(request.request_id)
            submit(request)

        engine.client.submit = record  # type: ignore[method-assign]
        return engine

    def _spoil(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        return [self._spoiled(event) for event in events]

    def _spoiled(self, event: SequenceEvent) -> SequenceEvent:
        if event.finish_reason is None or event.request_id not in self._fails:
            return event
        self._fails.remove(event.request_id)
        return SequenceEvent(event.request_id, event.index, event.token_ids, "abort", error="sampling is broken")
