"""The job's end of the channel to an actor: frames are sent in batches and received by polling."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from headrace.engine.process.engine_process import EngineProcess
from headrace.errors import EngineDeadError

POLL_S = 1.0  # how long an actor without frames holds a call
MAX_BATCH_BYTES = 4 << 20  # of frames in one call


class ActorCalls(Protocol):
    """The methods of an actor. Each waits for its reply, and raises an EngineDeadError if the actor has gone."""

    def send(self, frames: list[bytes]) -> None: ...

    def receive(self, timeout_s: float) -> list[bytes] | None: ...

    def kill(self) -> None:
        """End the actor now. Never waits, and may be called again."""


class ActorChannel:
    """Any thread may send; one receives. A thread of its own makes the calls that send."""

    def __init__(self, calls: ActorCalls) -> None:
        self._calls = calls
        self._outbox: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.death: EngineDeadError | None = None  # why the actor has gone
        self._sender = threading.Thread(target=self._send_all, name="headrace-actor-sender", daemon=True)
        self._sender.start()

    def send(self, payload: bytes) -> None:
        """Never waits. ConnectionError: the actor has gone."""
        with self._changed:
            if self._is_closed:
                raise ConnectionError("the channel is closed")
            self._outbox.append(payload)
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> list[bytes] | None:
        """The next frames. None: the engine has ended, or its actor has gone."""
        while not self._is_closed:
            try:
                frames = self._calls.receive(POLL_S if timeout_s is None else timeout_s)
            except EngineDeadError as error:
                self._end(error)
                return None
            if frames is None or frames or timeout_s is not None:
                return frames
        return None

    def hang_up(self) -> None:
        """Requests that are not sent yet are dropped."""
        self._end(None)

    def close(self) -> None:
        self.hang_up()
        self._calls.kill()

    def _end(self, death: EngineDeadError | None) -> None:
        with self._changed:
            self.death = self.death or death
            self._is_closed = True
            self._outbox.clear()
            self._changed.notify_all()

    def _send_all(self) -> None:
        while batch := self._next_batch():
            try:
                self._calls.send(batch)
            except EngineDeadError as error:
                return self._end(error)

    def _next_batch(self) -> list[bytes]:
        """What has gathered since the last call. Empty: the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._is_closed)
            batch, num_bytes = [], 0
            while self._outbox and num_bytes < MAX_BATCH_BYTES:
                batch.append(self._outbox.popleft())
                num_bytes += len(batch[-1])
            return batch


class ActorEngine(EngineProcess):
    """An engine in an actor: the same client as for a local process, over another channel. The actor runs already."""

    def __init__(self, calls: ActorCalls, *args: object, **options: object) -> None:
        """All but `calls` is as for `EngineProcess`."""
        self._calls = calls
        self._actor_channel = ActorChannel(calls)
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _connect(self) -> ActorChannel:
        return self._actor_channel

    def _launch(self) -> None:
        pass

    def _wait_for_exit(self) -> EngineDeadError:
        self._calls.kill()
        return self._actor_channel.death or EngineDeadError("its process on the cluster has ended")

    def _kill(self) -> None:
        self._calls.kill()
