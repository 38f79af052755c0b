"""The phase of a server: starting, ready, asleep, draining or dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["starting", "ready", "asleep", "draining", "dead"]


class ServerState:
    """`starting` until `ready` is called; `draining` after `drain`, for good; `dead` while there is no engine, `asleep`
    while it was put to sleep.

    `engine_phase` is called each time, since the engine may die and be restarted at any moment.
    """

    def __init__(self, engine_phase: Callable[[], str] = lambda: "ready") -> None:
        self._engine_phase = engine_phase
        self._is_started = False
        self._is_draining = False
        self._goes_to_sleep = False

    @property
    def phase(self) -> Phase:
        engine = self._engine_phase()
        if self._is_started and engine in ("restarting", "dead"):
            return "dead"
        if self._is_draining:
            return "draining"
        if self._is_started and (engine == "asleep" or self._goes_to_sleep):
            return "asleep"
        return "ready" if self._is_started else "starting"

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.phase == "ready"

    @property
    def is_alive(self) -> bool:
        """Whether waiting can help. A server that is not alive should be restarted."""
        return self.phase != "dead"

    def refuse_reason(self) -> str | None:
        """Why new requests are refused, as a metrics label; None if they are accepted."""
        phase = self.phase
        return None if phase == "ready" else {"dead": "engine_dead"}.get(phase, phase)

    def ready(self) -> None:
        self._is_started = True

    @contextmanager
    def going_to_sleep(self) -> Iterator[None]:
        """New requests are refused as if the engine slept already."""
        self._goes_to_sleep = True
        try:
            yield
        finally:
            self._goes_to_sleep = False

    def drain(self) -> None:
        self._is_draining = True
