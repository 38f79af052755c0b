"""The ranks above 0 of an engine, wherever they run: started, watched and ended by rank 0.

    caller's threads   send, wait_for, close
    a thread per rank  of this node (`rank_process.py`), and one per other node (`engine/nodes`): calls `took`, `ended`

The first failure is kept and ends all ranks. A rank whose connection breaks reports that too; what broke it, the end of
another process, is the better explanation, so such a report waits `GRACE_S` for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Protocol, TypeVar

from headrace.engine.process.engine_process import error_of
from headrace.engine.process.wire import Failed
from headrace.engine.ranks import wire
from headrace.engine.ranks.rank_process import RankOwner, RankProcess
from headrace.errors import EngineDeadError, HeadraceError
from headrace.steps import StepResult

Reply = TypeVar("Reply", wire.Started, wire.Loaded, wire.Built)
Result = TypeVar("Result")

GRACE_S = 0.5  # for a better explanation of a broken connection
CAUSE_S = 5.0  # for the end of a process to be noticed after a collective has failed
CLOSE_S = 10.0  # for the steps in flight, before a process is killed


class RanksElsewhere(Protocol):
    """The ranks of another node. Its thread calls the owner's methods."""

    def start(self, owner: RankOwner) -> None: ...

    def send(self, frame: bytes) -> None:
        """Send a message to all of its ranks. Never waits, and never fails."""

    def send_to(self, rank: int, frame: bytes) -> None: ...

    def join(self, timeout_s: float) -> None: ...

    def kill(self) -> None: ...


class RankProcesses:
    """Owns the ranks 1 to `size` - 1: those of this node, which has `num_local` ranks, and those of other nodes.
    `on_failure` is called at most once, on a thread of its own."""

    def __init__(
        self,
        size: int,
        on_failure: Callable[[], None] = lambda: None,
        *,
        num_local: int | None = None,
        nodes: Sequence[RanksElsewhere] = (),
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_local`: None if all ranks are on this node."""
        self._size = size
        self._changed = threading.Condition()
        self._failure: HeadraceError | None = None
        self._on_failure = on_failure
        self._on_closed = on_closed
        self._on_failures: list[Callable[[EngineDeadError], None]] = []
        self._is_closing = False
        self._results: dict[int, Future[StepResult]] = {}  # of submitted steps, by their number
        self._replies: dict[int, dict[type, object]] = {rank: {} for rank in range(1, size)}
        self._ranks = [RankProcess(self, rank, self._name(rank)) for rank in range(1, num_local or size)]
        self._nodes = nodes
        for rank in self._ranks:
            rank.start()
        for node in nodes:
            node.start(self)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._size}"

    @property
    def failure(self) -> EngineDeadError | None:
        failure = self._failure
        return failure if failure is None or isinstance(failure, EngineDeadError) else EngineDeadError(str(failure))

    def on_failure(self, call: Callable[[EngineDeadError], None]) -> None:
        """Call this once a rank has failed, on a thread of its own; at once if one has."""
        with self._changed:
            self._on_failures.append(call)
            failure = self.failure
        if failure is not None:
            call(failure)

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started on this node."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    def start(self, messages: list[wire.Start]) -> None:
        """Let each rank load its part of the model, once it has imported torch."""
        local = {rank.rank: rank for rank in self._ranks}
        for rank, message in enumerate(messages, 1):
            frame = wire.encode(message)
            if rank in local:
                local[rank].send(frame)
                continue
            for node in self._nodes:  # the one that has it takes it
                node.send_to(rank, frame)

    def send(self, frame: bytes) -> None:
        """Send a message to all ranks. Never waits for them."""
        if self._failure is not None:
            raise self._failure
        self._send_to_all(frame)

    def _send_to_all(self, frame: bytes) -> None:
        for node in self._nodes:
            node.send(frame)
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
                lambda: self._failure is not None or all(kind in replies for replies in self._replies.values())
            )
            if self._failure is not None:
                raise self._failure
            return [replies[kind] for replies in self._replies.values()]  # type: ignore[misc]

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
        self._send_to_all(wire.encode(wire.Close()))
        deadline = monotonic() + CLOSE_S
        for node in self._nodes:
            node.join(max(0.0, deadline - monotonic()))
        for rank in self._ranks:
            rank.join(max(0.0, deadline - monotonic()))
        self.kill()
        self._on_closed()

    def kill(self) -> None:
        for node in self._nodes:
            node.kill()
        for rank in self._ranks:
            rank.kill()

    # ---- on the ranks' threads

    def took(self, rank: int, frame: bytes) -> None:
        reply = wire.decode_reply(frame)
        if isinstance(reply, Failed):
            has_run = wire.Built in self._replies[rank]
            error = error_of(Failed(reply.kind, f"{self._name(rank)}: {reply.text}"), has_run=has_run)
            self._report(error, is_certain=not isinstance(error, EngineDeadError))
        elif isinstance(reply, wire.Result):
            self._took_result(reply.result)
        elif not isinstance(reply, wire.Heartbeat):
            with self._changed:
                self._replies[rank][type(reply)] = reply
                self._changed.notify_all()

    def ended(self, error: EngineDeadError) -> None:
        self._report(error, is_certain=True)

    def _took_result(self, result: StepResult) -> None:
        with self._changed:
            future = self._results.pop(result.step)
        future.set_result(result)

    def _fail_results(self) -> None:
        with self._changed:
            futures, self._results = list(self._results.values()), {}
        for future in futures:
            future.set_exception(self.failure or EngineDeadError("the ranks were closed"))

    def _report(self, error: HeadraceError, *, is_certain: bool) -> None:
        """A rank has failed. `is_certain`: no report of another rank could explain it."""
        with self._changed:
            if not is_certain:
                self._changed.wait_for(lambda: self._failure is not None or self._is_closing, GRACE_S)
            if self._is_closing or self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
            failure, calls = self.failure, list(self._on_failures)
        self.kill()
        self._fail_results()
        self._on_failure()
        assert failure is not None
        for call in calls:
            call(failure)
