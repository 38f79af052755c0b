"""How a front (server, job, `LLM`) talks to an engine: requests from any thread, events through one callback.

The core runs on a thread of its own: the front never waits for a step, and the core never for a tokenizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.engine.core import EngineCore, EngineStats
from headrace.engine.forks import end_in_forks
from headrace.engine.loop import EngineLoop
from headrace.engine.profiler import EngineProfiler, ProfileOptions
from headrace.errors import EngineDeadError
from headrace.types import Request, SequenceEvent

Deliver = Callable[[list[SequenceEvent]], None]  # called with no events when the engine has failed


class Client(Protocol):
    """What a front may ask an engine to do, wherever that runs."""

    @property
    def stats(self) -> EngineStats: ...

    @property
    def failure(self) -> BaseException | None: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def limit_running(self, num_seqs: int | None) -> None: ...

    def forget_prefixes(self) -> None: ...

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]: ...

    def stop_profile(self) -> Future[dict[str, Any]]: ...

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]: ...

    def unload_adapter(self, name: str) -> Future[None]: ...

    def close(self) -> None:
        """Stop after the step in flight and refuse all later requests; `failure` says that it was closed."""


class EngineClient(EngineLoop):
    """An engine's loop on a thread of its own. `deliver` is called there with the events of each step, and must not
    block."""

    def __init__(self, core: EngineCore, deliver: Deliver, profiler: EngineProfiler | None = None) -> None:
        super().__init__(
            core,
            lambda events: deliver(events) if events else None,
            lambda failure: deliver([]),
            profiler=profiler,
        )
        self._thread = threading.Thread(target=self.run, name="headrace-engine", daemon=True)
        self._thread.start()
        end_in_forks(self)

    def close(self) -> None:
        """Stop after the step in flight. Unfinished requests stay unfinished, and later ones are refused. Nothing is
        delivered: the front that closes its engine tells its own callers."""
        self.stop()
        self._thread.join()
        self._refuse_from_now_on(EngineDeadError("it was closed"))

    def end_in_fork(self, failure: EngineDeadError) -> None:
        self._condition = threading.Condition()  # the engine's thread may have held the other one
        self._refuse_from_now_on(failure)
