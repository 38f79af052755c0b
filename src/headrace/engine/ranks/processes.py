"""The processes of the ranks above 0: started, watched and ended by rank 0.

    caller's threads   send, wait_for, close
    a thread per rank  starts its process, receives its replies, notices its end or its silence

The first failure is kept and ends all ranks. A rank whose connection breaks reports that too; what broke it, the end of
another process, is the better explanation, so such a report waits `GRACE_S` for one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

from headrace import logs
from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import (
    ProcessHealth,
    child_environment,
    describe_exit,
    error_of,
    wait_for,
)
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.process.wire import Failed
from headrace.engine.ranks import wire
from headrace.errors import EngineDeadError, HeadraceError
from headrace.steps import StepResult

Reply = TypeVar("Reply", wire.Started, wire.Loaded, wire.Built)
Result = TypeVar("Result")

HEARTBEAT_S = 1.0
TIMEOUT_S = 10.0  # without a heartbeat; a rank sends one every `HEARTBEAT_S` from a thread of its own
CHECK_S = 0.5
GRACE_S = 0.5  # for a better explanation of a broken connection
CAUSE_S = 5.0  # for the end of a process to be noticed after a collective has failed
CLOSE_S = 10.0  # for the steps in flight, before a process is killed


class RankProcesses:
    """Owns the ranks 1 to `size` - 1. `on_failure` is called at most once, on a thread of its own."""

    def __init__(
        self, size: int, on_failure: Callable[[], None] = lambda: None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._changed = threading.Condition()
        self._failure: HeadraceError | None = None
        self._on_failure = on_failure
        self._is_closing = False
        self._results: dict[int, Future[StepResult]] = {}  # of submitted steps, by their number
        self._ranks = [_Rank(self, rank, size, timeout_s) for rank in range(1, size)]
        for rank in self._ranks:
            rank.start()

    @property
    def failure(self) -> EngineDeadError | None:
        failure = self._failure
        return failure if failure is None or isinstance(failure, EngineDeadError) else EngineDeadError(str(failure))

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    def start(self, messages: list[wire.Start]) -> None:
        """Let each rank load its part of the model, once it has imported torch."""
        for rank, message in zip(self._ranks, messages, strict=True):
            rank.send(wire.encode(message))

    def send(self, frame: bytes) -> None:
        """Send a message to all ranks. Never waits for them."""
        if self._failure is not None:
            raise self._failure
        for rank in self._ranks:
            rank.send(frame)

    def expect_result(self, step: int) -> Future[StepResult]:
        """The result that the last stage of a pipeline will send. Called before the plan is sent."""
        future: Future[StepResult] = Future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._results[step] = future
        return future

    def wait_for(self, kind: type[Reply]) -> list[Reply]:
        """The replies of this kind, one of each rank. Raises the failure of a rank."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(kind in rank.replies for rank in self._ranks)
            )
            if self._failure is not None:
                raise self._failure
            return [rank.replies[kind] for rank in self._ranks]  # type: ignore[misc]

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function that waits for the other ranks; raises the failure of one of them at once."""
        found: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(function())
            except BaseException as error:  # noqa: BLE001  raised by the caller
                errors.append(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name="headrace-connect", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: bool(self._failure or found or errors))
        if self._failure is not None:
            raise self._failure
        if errors:
            raise self.cause_of(errors[0])
        return found[0]

    def cause_of(self, error: BaseException) -> BaseException:
        """The failure of a rank that explains an error of a step, if one is noticed soon; else the error. Either way no
        step follows, and all ranks end."""
        with self._changed:
            if isinstance(error, RuntimeError):  # as of a collective
                self._changed.wait_for(lambda: self._failure is not None, CAUSE_S)
            self._is_closing = True
        self.kill()
        return self.failure or error

    def close(self) -> None:
        """Let the ranks finish their steps and end. One that does not is killed."""
        with self._changed:
            self._is_closing = True
        for rank in self._ranks:
            rank.send(wire.encode(wire.Close()))
        deadline = monotonic() + CLOSE_S
        for rank in self._ranks:
            rank.join(max(0.0, deadline - monotonic()))
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    # ---- on the ranks' threads

    def took_reply(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def took_result(self, result: StepResult) -> None:
        with self._changed:
            future = self._results.pop(result.step)
        future.set_result(result)

    def _fail_results(self) -> None:
        with self._changed:
            futures, self._results = list(self._results.values()), {}
        for future in futures:
            future.set_exception(self.failure or EngineDeadError("the ranks were closed"))

    def report(self, error: HeadraceError, *, is_certain: bool) -> None:
        """A rank has failed. `is_certain`: no report of another rank could explain it."""
        with self._changed:
            if not is_certain:
                self._changed.wait_for(lambda: self._failure is not None or self._is_closing, GRACE_S)
            if self._is_closing or self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        self.kill()
        self._fail_results()
        self._on_failure()


class _Rank:
    """One process, and the thread that started it: Linux kills the process with that thread."""

    def __init__(self, owner: RankProcesses, rank: int, size: int, timeout_s: float) -> None:
        self._owner = owner
        self._name = f"rank {rank} of {size}"
        self._timeout_s = timeout_s
        self.replies: dict[type, object] = {}
        self.process: subprocess.Popen[bytes] | None = None
        ours, self._theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headrace-rank-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._has_started.wait()

    def send(self, frame: bytes) -> None:
        try:
            self._channel.send(frame)
        except OSError:
            pass  # its thread reports why it has gone

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def _run(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            self._owner.report(EngineDeadError(f"{self._name} could not be started: {error}"), is_certain=True)
            return
        finally:
            self._has_started.set()
        self._receive()
        assert self.process is not None
        status = wait_for(self.process)
        self._channel.close()
        text = describe_exit(status)
        self._owner.report(EngineDeadError(f"{self._name} (process {self.process.pid}): {text}"), is_certain=True)

    def _spawn(self) -> None:
        with self._theirs as theirs:
            command = [sys.executable, "-P", "-m", "headrace.engine.ranks.child"]
            arguments = [str(theirs.fileno()), str(os.getpid()), str(HEARTBEAT_S), self._name]
            self.process = subprocess.Popen(
                [*command, *arguments, *(["json"] if logs.is_json() else [])],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to the front
                pass_fds=[theirs.fileno()],
                env=child_environment(),
            )

    def _receive(self) -> None:
        """Take replies until the process ends or is silent for too long."""
        check, health = HealthCheck(self._timeout_s, monotonic), ProcessHealth()
        while (frames := self._channel.receive(CHECK_S)) is not None:
            health = health._replace(num_frames=health.num_frames + len(frames))
            for frame in frames:
                self._take(wire.decode_reply(frame))
            problem = check.problem(health)
            if problem is not None:
                assert self.process is not None
                text = f"{self._name} (process {self.process.pid}) hangs: {problem}"
                self._owner.report(EngineDeadError(text), is_certain=True)
                self.kill()
                return

    def _take(self, reply: wire.Reply) -> None:
        if isinstance(reply, Failed):
            has_run = wire.Built in self.replies
            error = error_of(Failed(reply.kind, f"{self._name}: {reply.text}"), has_run=has_run)
            self._owner.report(error, is_certain=not isinstance(error, EngineDeadError))
        elif isinstance(reply, wire.Result):
            self._owner.took_result(reply.result)
        elif not isinstance(reply, wire.Heartbeat):
            self.replies[type(reply)] = reply
            self._owner.took_reply()
