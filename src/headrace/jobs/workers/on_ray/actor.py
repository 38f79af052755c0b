"""The process of an engine on a node of a Ray cluster. Ray calls its methods, on several threads.

send(frames) ─▶ inbox ─▶ EngineChild, as in a local engine process ─▶ outbox ─▶ receive()
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic

from headrace.engine.process.child import EngineChild
from headrace.engine.process.engine_process import HEARTBEAT_S

BATCH_S = 0.02  # between two replies with events: a job needs few messages more than it needs them early


class MailBox:
    """The engine's end of a channel whose frames are put in and taken out by calls."""

    def __init__(self, *, batch_s: float = BATCH_S) -> None:
        self._batch_s = batch_s
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._replied_at = 0.0
        self._has_ended = False

    # For the engine.

    def send(self, payload: bytes) -> None:
        with self._changed:
            self._outbox.append(payload)
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> list[bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox, timeout_s)
            frames = list(self._inbox)
            self._inbox.clear()
            return frames

    def hang_up(self) -> None:
        """The engine has ended: `take` returns what is left, then None."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        self.hang_up()

    # For the calls.

    def put(self, frames: list[bytes]) -> None:
        with self._changed:
            self._inbox.extend(frames)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[bytes] | None:
        """All frames since the last call, at most one reply per `batch_s`. Empty after the timeout; None after the
        engine's end."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._outbox or self._has_ended, timeout_s):
                return []
            self._changed.wait_for(lambda: self._has_ended, max(0.0, self._replied_at + self._batch_s - monotonic()))
            frames = list(self._outbox)
            self._outbox.clear()
            self._replied_at = monotonic()
            return frames or (None if self._has_ended else [])


class EngineActor:
    """Starts the engine's thread at once; it loads the model when the `Start` command arrives."""

    def __init__(self, core: str) -> None:
        """`core`: the function `module:name` that loads the engine's core."""
        self._mail = MailBox()
        self._core = core
        threading.Thread(target=self._run, name="headrace-engine", daemon=True).start()

    def _run(self) -> None:
        try:
            EngineChild(self._mail, HEARTBEAT_S).run(self._core)
        finally:
            self._mail.hang_up()

    def is_placed(self) -> bool:
        """Answers once the actor runs."""
        return True

    def send(self, frames: list[bytes]) -> None:
        self._mail.put(frames)

    def receive(self, timeout_s: float) -> list[bytes] | None:
        return self._mail.take(timeout_s)
