"""The process of one rank above 0, and the thread that starts it, receives from it, and notices its end or silence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from time import monotonic
from typing import Protocol

from headrace import logs
from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import ProcessHealth, child_environment, describe_exit, wait_for
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.ranks import wire
from headrace.errors import EngineDeadError

HEARTBEAT_S = 1.0
TIMEOUT_S = 10.0  # without a heartbeat; a rank sends one every `HEARTBEAT_S` from a thread of its own
IMPORT_TIMEOUT_S = 120.0  # the same while torch is imported: its libraries are loaded with all threads held
CHECK_S = 0.5


class RankOwner(Protocol):
    """What the threads of ranks call."""

    def took(self, rank: int, frame: bytes) -> None:
        """A reply of a rank has arrived."""

    def ended(self, error: EngineDeadError) -> None:
        """A rank has ended or hangs. The error names it."""


class RankProcess:
    """Owns the process. Linux kills it with the thread that started it."""

    def __init__(self, owner: RankOwner, rank: int, name: str) -> None:
        self._owner = owner
        self.rank = rank
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        ours, self._theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headrace-rank-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._has_started.wait()

    def send(self, frame: bytes) -> None:
        """Never waits."""
        try:
            self._channel.send(frame)
        except OSError:
            pass  # its thread reports why it has gone

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _run(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            self._owner.ended(EngineDeadError(f"{self.name} could not be started: {error}"))
            return
        finally:
            self._has_started.set()
        self._receive()
        assert self.process is not None
        status = wait_for(self.process)
        self._channel.close()
        self._owner.ended(EngineDeadError(f"{self.name} (process {self.process.pid}): {describe_exit(status)}"))

    def _spawn(self) -> None:
        with self._theirs as theirs:
            command = [sys.executable, "-P", "-m", "headrace.engine.ranks.child"]
            arguments = [str(theirs.fileno()), str(os.getpid()), str(HEARTBEAT_S), self.name]
            self.process = subprocess.Popen(
                [*command, *arguments, *(["json"] if logs.is_json() else [])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to the front
                pass_fds=[theirs.fileno()],
                env=child_environment(),
            )

    def _receive(self) -> None:
        """Take replies until the process ends or is silent for too long."""
        check, health, has_imported = HealthCheck(IMPORT_TIMEOUT_S, monotonic), ProcessHealth(), False
        while (frames := self._channel.receive(CHECK_S)) is not None:
            health = health._replace(num_frames=health.num_frames + len(frames))
            for frame in frames:
                self._owner.took(self.rank, frame)
            if not has_imported and any(isinstance(wire.decode_reply(frame), wire.Started) for frame in frames):
                check, has_imported = HealthCheck(TIMEOUT_S, monotonic), True
            problem = check.problem(health)
            if problem is not None:
                assert self.process is not None
                self._owner.ended(EngineDeadError(f"{self.name} (process {self.process.pid}) hangs: {problem}"))
                self.kill()
                return
