"""A job on simulated workers, without threads or time: a seeded random number generator decides what happens next.

    main loop ─ waits for a message ─▶ SimulatedInbox ─▶ one event: a line ends, an engine dies, a start ends or fails

The main loop, its policy and its planner are the real ones. If it waits and no event can happen, it waits for ever.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import numpy as np

from headrace.config import EngineConfig
from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError, MachineLostError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.formats.writer import StreamResults
from headrace.jobs.input.feed import InputEnded
from headrace.jobs.planning.workload import WorkLeft
from headrace.jobs.recovery.job_engine import DeadClient, DeadEngine
from headrace.jobs.recovery.policy import RecoveryPolicy
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.inbox import Message
from headrace.jobs.run.main_loop import MainLoop
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.console import Console
from headrace.jobs.store.failure_log import FailureLog
from headrace.jobs.workers.worker_set import Workers
from headrace.sched import SchedulerStats
from headrace.types import Request, SequenceEvent
from tests.jobs.faults import AT_ONCE, MARK

MAX_IDLE_WAITS = 4  # a death, its restart and the next submission each take an iteration without an event


class NoEventLeftError(AssertionError):
    """The main loop waits for something that will never happen."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The lines of a job and what happens to its workers. A poison prompt kills its engine instead of ending."""

    num_lines: int
    poison: frozenset[int] = frozenset()  # numbers of prompts
    num_prompts: int = 1_000_000  # different ones; with fewer than lines, some lines are duplicates
    num_parts: int = 1  # prompts of each line
    num_workers: int = 2
    max_sequences: int = 8  # in flight on a worker
    num_deaths: int = 0  # by chance, at any time
    num_lost_machines: int = 0
    num_failed_starts: int = 0

    @classmethod
    def of(cls, seed: int) -> Mix:
        """Any mix."""
        random = Random(seed)
        num_lines = random.randint(1, 24)
        num_prompts = random.choice([1_000_000, max(1, num_lines // 2)])
        num_poison = random.choice([0, 1, 2, 3])
        return cls(
            num_lines=num_lines,
            poison=frozenset(random.sample(range(min(num_lines, num_prompts)), min(num_lines // 2, num_poison))),
            num_prompts=num_prompts,
            num_parts=random.choice([1, 1, 3]),
            num_workers=random.choice([1, 2, 2, 3, 4]),
            max_sequences=random.choice([1, 4, 8, 22]),
            num_deaths=random.choice([0, 0, 1, 2, 5]),
            num_lost_machines=random.choice([0, 0, 2]),
            num_failed_starts=random.choice([0, 0, 1, 2]),
        )

    @property
    def poison_lines(self) -> set[int]:
        return {index for index in range(self.num_lines) if index % self.num_prompts in self.poison}


class Chances:
    """The events that are left to happen by chance, over all workers."""

    def __init__(self, mix: Mix, random: Random) -> None:
        self._left = Counter(death=mix.num_deaths, failed_start=mix.num_failed_starts, machine=mix.num_lost_machines)
        self.random = random

    def happens(self, what: str) -> bool:
        if not self._left[what] or self.random.random() > 0.2:
            return False
        self._left[what] -= 1
        return True


class SimulatedWorker:
    """A `Worker` whose engine does one thing at each call of `advance`."""

    def __init__(self, number: int, engine: Engine, chances: Chances, *, max_sequences: int) -> None:
        self.number = number
        self.num_restarts = 0
        self.max_sequences = max_sequences
        self.engine = engine
        self._chances = chances
        self._requests: list[Request] = []
        self._failure: BaseException | None = None
        self.is_released = False
        self.is_starting = False
        self._start_error: RuntimeError | None = None
        self.has_started = False

    # What the main loop asks.

    @property
    def settings(self) -> Settings:
        return self.engine.settings

    @property
    def stats(self) -> EngineStats:
        return EngineStats(SchedulerStats(), 0.0, 0.0)

    def submit(self, request: Request) -> None:
        if not self.is_running:
            raise EngineDeadError("it has died")
        if self._chances.happens("death"):
            self._failure = RuntimeError("died while a line was submitted")
            raise EngineDeadError("it has died")
        self._requests.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._requests = [request for request in self._requests if request.request_id != request_id]

    def set_target_concurrency(self, left: WorkLeft, *, num_workers: int = 1) -> None:
        pass

    @property
    def is_running(self) -> bool:
        return self._failure is None and not self.is_released and not self.is_starting

    @property
    def death(self) -> BaseException | None:
        return None if self.is_released else self._failure

    def release_dead(self) -> DeadEngine:
        assert self._failure is not None
        failure, self._failure = self._failure, None
        self.is_released, self._requests = True, []
        return DeadEngine(failure, self.settings, had_own_process=True)

    def begin_start(self, config: EngineConfig) -> None:
        assert self.is_released and not self.is_starting
        self.is_starting, self.has_started = True, False

    def finish_start(self) -> None:
        self.is_starting = self.has_started = False
        error, self._start_error = self._start_error, None
        if error is not None:
            raise error
        self.is_released = False
        self.num_restarts += 1

    def close(self) -> None:
        pass

    # What happens to it.

    @property
    def can_advance(self) -> bool:
        return (self.is_starting and not self.has_started) or (self.is_running and bool(self._requests))

    def advance(self) -> list[SequenceEvent]:
        chances = self._chances
        if self.is_starting:
            self.has_started = True
            self._start_error = RuntimeError("no such device") if chances.happens("failed_start") else None
            return []
        request = self._requests[chances.random.randrange(min(4, len(self._requests)))]
        if MARK in request.prompt_token_ids or chances.happens("death"):
            self._failure = RuntimeError("the device is gone")
            return []
        if chances.happens("machine"):
            self._failure = MachineLostError("its node has gone")
            return []
        self._requests.remove(request)
        return [SequenceEvent(request.request_id, 0, np.array([65, 66], np.int32), "length")]


class SimulatedInbox:
    """Advances one of the workers whenever the main loop waits and has read its whole input."""

    def __init__(self, workers: Sequence[SimulatedWorker], random: Random) -> None:
        self._workers = workers
        self._random = random
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._has_ended = False
        self._num_idle_waits = 0

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def qsize(self) -> int:
        return self._messages.qsize() if self._has_ended else 0

    def get(self, *, timeout: float = 0.0) -> Message:
        if not self._has_ended:
            message = self._messages.get(timeout=60.0)
            self._has_ended = isinstance(message, InputEnded)
            return message
        if self._messages.qsize():
            return self._messages.get()
        return self._next_event()

    def _next_event(self) -> list[SequenceEvent]:
        able = [worker for worker in self._workers if worker.can_advance]
        self._num_idle_waits = 0 if able else self._num_idle_waits + 1
        if self._num_idle_waits > MAX_IDLE_WAITS:
            raise NoEventLeftError("the main loop waits for ever")
        if not able:
            raise Empty
        return self._random.choice(able).advance()


class Lines:
    """The output of a simulated job."""

    def __init__(self) -> None:
        self.is_answered: dict[int, bool] = {}  # by line; the others are error lines

    def append(self, line: bytes) -> None:
        found = json.loads(line)
        index = int(found["custom_id"])
        assert index not in self.is_answered, "a line has two results"
        self.is_answered[index] = found["response"]["status_code"] == 200

    def flush(self) -> None:
        pass


def simulate(mix: Mix, seed: int, engine: Engine, *, log: FailureLog | None = None) -> Lines:
    """Run a job to its end. `engine`: that of `stopped_engine`. `log`: of earlier runs."""
    random = Random(seed)
    chances = Chances(mix, random)
    workers = [SimulatedWorker(n, engine, chances, max_sequences=mix.max_sequences) for n in range(mix.num_workers)]
    inbox: Any = SimulatedInbox(workers, random)
    lines = Lines()
    context = RunContext.build(
        JobSpec(input="-", output="-"),
        StreamResults(lines),
        inbox=inbox,
        workers=Workers(workers),
        console=Console(enabled=False),
        recovery=RecoveryPolicy(
            log or FailureLog(None), EngineConfig(), rules=AT_ONCE, shares=[(EngineConfig(), 1)] * mix.num_workers
        ),
    )
    MainLoop(context, [input_lines(mix)]).run()
    return lines


def input_lines(mix: Mix) -> list[InputLine]:
    return [InputLine(index, 0, json.dumps(_line(mix, index)).encode()) for index in range(mix.num_lines)]


def _line(mix: Mix, index: int) -> dict[str, Any]:
    number = index % mix.num_prompts
    prompts = [f"prompt {number}.{part}{chr(MARK) if number in mix.poison else ''}" for part in range(mix.num_parts)]
    body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    return {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}


def stopped_engine(start: Callable[..., Engine]) -> Engine:
    """What a job needs to know about its engines."""
    engine = start(EngineConfig(), lambda events: None)
    engine.close()
    return replace(engine, client=DeadClient(EngineDeadError("simulated")), model=None)
