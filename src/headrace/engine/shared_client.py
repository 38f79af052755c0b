"""`SharedClient`: a second front on an engine that another front owns, such as a batch job on a server's engine.

server ─▶ AsyncEngine ─┐
                       ├─▶ one engine; events are told apart by the prefix of the request id
job ─▶ SharedClient ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace.engine.client import Client, Deliver
from headrace.engine.core import EngineStats
from headrace.engine.profiler import ProfileOptions
from headrace.errors import AdapterError, EngineDeadError, ProfilerError, RequestError
from headrace.types import Request, SequenceEvent

SHARED = "shared:"  # the start of the ids of all shared clients' requests; ids of HTTP requests start otherwise


class SharedClient:
    """An engine client (`engine/client.Client`) for one user of a shared engine. It never starts, limits or stops the
    engine. After a failure of the engine it stays dead, also when the engine is back: its user makes a new one."""

    def __init__(
        self,
        client: Client,
        deliver: Deliver,
        *,
        number: int,
        engine: int = 0,
        priority: int,
        cache_salt: str | None,
        max_sequences: int,
        adapters: Collection[str] = (),
        on_close: Callable[[SharedClient], None],
    ) -> None:
        """`cache_salt` is put before that of each request. `max_sequences` may be in flight at once. `adapters` are the
        loaded ones; the owner changes them."""
        self.prefix = f"{SHARED}{number}/"
        self.max_sequences = max_sequences
        self.engine = engine  # its number, where the owner has several
        self._client = client
        self._deliver = deliver
        self._priority = priority
        self._cache_salt = cache_salt
        self._adapters = adapters
        self._on_close = on_close
        self._failure: BaseException | None = None

    @property
    def stats(self) -> EngineStats:
        """The counters of the whole engine."""
        return self._client.stats

    @property
    def failure(self) -> BaseException | None:
        return self._failure or self._client.failure

    def submit(self, request: Request) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}")
        if request.adapter is not None and request.adapter not in self._adapters:
            message = f"the adapter {request.adapter!r} was unloaded before the request started"
            raise RequestError(message, param="model", code="model_not_found")
        self._client.submit(
            msgspec.structs.replace(
                request,
                request_id=self.prefix + request.request_id,
                priority=self._priority,
                cache_salt=self._salted(request.cache_salt),
            )
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._client.abort(self.prefix + request_id, index)

    def limit_running(self, num_seqs: int | None) -> None:
        """No effect: the limit would hold for the engine's other users too."""

    def forget_prefixes(self) -> None:
        """No effect: the other users' prefixes would be lost too."""

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        raise ProfilerError("a shared engine is profiled by its owner")

    def stop_profile(self) -> Future[dict[str, Any]]:
        raise ProfilerError("a shared engine is profiled by its owner")

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        raise AdapterError("the adapters of a shared engine are loaded by its owner")

    def unload_adapter(self, name: str) -> Future[None]:
        raise AdapterError("the adapters of a shared engine are unloaded by its owner")

    def close(self) -> None:
        """Deliver nothing from now on. The engine goes on."""
        self._failure = self._failure or EngineDeadError("it was closed")
        self._on_close(self)

    def take(self, events: list[SequenceEvent]) -> None:
        """Events of this client's requests. Called on the engine's thread."""
        start = len(self.prefix)
        self._deliver([msgspec.structs.replace(event, request_id=event.request_id[start:]) for event in events])

    def fail(self, failure: BaseException | None) -> None:
        """The engine has failed. Called on the engine's thread."""
        self._failure = failure or EngineDeadError("the engine has stopped")
        self._deliver([])

    def _salted(self, given: str | None) -> str | None:
        if self._cache_salt is None:
            return given
        return self._cache_salt if given is None else f"{self._cache_salt}/{given}"
