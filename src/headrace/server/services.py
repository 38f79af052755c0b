"""What the endpoints work with: the engine and the parts of the server around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from secrets import token_hex
from time import time
from types import TracebackType
from typing import Any, Protocol

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core import EngineStats
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor.evaluation import AlertStates
from headrace.monitor.history import History
from headrace.monitor.times import RequestTimes
from headrace.server.batch.service import BatchService
from headrace.server.options import ServerOptions
from headrace.server.response_store import Archive, ResponseStore
from headrace.server.sagemaker_sessions import SageMakerSessions
from headrace.types import Request


class Reservation(Protocol):
    """A place in the queue, reserved before the prompt is tokenized."""

    def count_tokens(self, num_tokens: int) -> None: ...
    def started(self) -> None: ...
    def release(self) -> None: ...
    def __enter__(self) -> Reservation: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RequestQueue(Protocol):
    @property
    def num_in_flight(self) -> int: ...
    @property
    def oldest_wait_s(self) -> float: ...
    @property
    def usage(self) -> float | None: ...
    def reserve(self, num_requests: int = 1, *, num_tokens: int = 0) -> Reservation: ...


class Metrics(Protocol):
    def received(self, *, n: int, max_tokens: int | None) -> None: ...
    def refused(self, reason: str) -> None: ...
    def finished(self, times: RequestTimes, reason: str) -> None: ...
    def first_token(self, seconds: float, *, engine: int = 0) -> None: ...
    def answered(self, handler: str, method: str, status: int) -> None: ...
    def restarted(self, *, engine: int = 0) -> None: ...
    def sleeping(self, level: int) -> None: ...
    def oldest_wait(self, seconds: float) -> None: ...
    def queue_usage(self, share: float | None) -> None: ...
    def batches(self, by_status: Mapping[str, int], *, num_answered: int, num_failed: int) -> None: ...
    def observe(self, *each: EngineStats | None) -> None: ...
    def render(self, accept: str | None = None) -> tuple[bytes, str]: ...


class State(Protocol):
    @property
    def is_ready(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    def refuse_reason(self) -> str | None: ...
    def going_to_sleep(self) -> AbstractContextManager[None]: ...


class BatchDispatcher(Protocol):
    """Dynamic batching: requests wait for a place in the engine."""

    def enter(
        self, *, size: int = 1, priority: int = 0, timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[None]: ...


class Bottleneck(Protocol):
    """What limits this server."""

    @property
    def document(self) -> bytes: ...


class Control(Protocol):
    """Operations of the /admin routes."""

    def drain(self) -> None: ...
    def reload_keys(self) -> bool: ...


class Traces(Protocol):
    """Spans of requests."""

    def finished(self, scope: Mapping[str, Any], request: Request, times: RequestTimes, reason: str) -> None: ...


class SelfMonitor(Protocol):
    """History of the server's own metrics, and its alerts."""

    @property
    def history(self) -> History: ...
    @property
    def alerts(self) -> AlertStates: ...
    def now(self) -> dict[str, float | None]: ...


@dataclass
class Services:
    engine: AsyncEngine
    options: ServerOptions
    queue: RequestQueue
    metrics: Metrics
    model_name: str
    state: State
    dispatcher: BatchDispatcher | None = None
    deadline_s: Callable[[Mapping[str, Any]], float | None] | None = (
        None  # from the request scope; None: from the options
    )
    control: Control | None = None
    config: EngineConfig = field(default_factory=EngineConfig)  # the user's settings of the engine
    started_at: int = field(default_factory=lambda: int(time()))
    num_in_flight: int = 0  # requests being handled
    num_restarts: dict[int, int] = field(default_factory=dict)  # of each engine, those that were counted
    self_monitor: SelfMonitor | None = None
    bottleneck: Bottleneck | None = None
    traces: Traces | None = None  # None: requests are not traced
    gpus: GpuMonitor | None = None
    batches: BatchService | None = None  # None: the Batch API is off
    response_archive: Archive | None = None  # None: stored responses end with the server
    responses: ResponseStore = field(init=False)  # those of /v1/responses
    background: set[asyncio.Task[None]] = field(default_factory=set)  # responses that are generated without a client
    sagemaker_sessions: SageMakerSessions | None = None  # None: they are off
    asleep: set[str] = field(default_factory=set)  # the parts of the engine that sleep, by vLLM's tags
    instance_id: str = field(default_factory=lambda: token_hex(8))  # differs after a restart of the server

    def __post_init__(self) -> None:
        options = self.options
        self.responses = ResponseStore(
            max_responses=options.max_stored_responses,
            max_bytes=options.max_stored_response_bytes,
            archive=self.response_archive,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model itself that requests may use; answers have the first."""
        return (self.model_name, *self.options.model_names[1:])

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's `model` names; None: it is the model itself."""
        return name if name in self.engine.adapters else None

    def answering(self, name: str | None) -> str:
        """The `model` of the answer to a request for this one."""
        return self.adapter_of(name) or self.model_name

    def observe_engine(self) -> bool:
        """Bring the metrics up to date: counters and restarts of the engines, and the state of the queue.

        Whatever reads the metrics calls it first: a scrape, the watch of bottlenecks, the alerts. It returns whether
        any engine responds.
        """
        states = self.engine.states
        for number, state in enumerate(states):
            for _ in range(state.num_restarts - self.num_restarts.get(number, 0)):
                self.metrics.restarted(engine=number)
            self.num_restarts[number] = state.num_restarts
        self.metrics.oldest_wait(self.queue.oldest_wait_s)
        self.metrics.queue_usage(self.queue.usage)
        if self.batches is not None:
            runner = self.batches.runner
            self.metrics.batches(runner.num_by_status, num_answered=runner.num_answered, num_failed=runner.num_failed)
        stats = [state.stats for state in states]
        self.metrics.observe(*stats)
        return any(each is not None for each in stats)
