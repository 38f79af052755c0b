"""The front's end of an engine in a process of its own: the same calls as an engine on a thread, over a channel.

    front's threads   submit, abort ... ─▶ frames ─▶ the process
    own thread        starts the process; frames ─▶ deliver(events); ends with the process

Nothing here imports torch: the weights and all computation are in the process.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import headrace
from headrace import errors, logs
from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.forks import end_in_forks
from headrace.engine.process import wire
from headrace.engine.process.channel import Channel, FrameChannel
from headrace.engine.profiler import ProfileOptions
from headrace.errors import AdapterError, EngineDeadError, HeadraceError, ProfilerError, RequestError
from headrace.sched import SchedulerStats
from headrace.startup import Report
from headrace.types import Request, SequenceEvent

LOAD_CORE = "headrace.engine.start:load_core"
HEARTBEAT_S = 1.0
CLOSE_S = 10.0  # for the step in flight, before the process is killed
LAST_LINES_S = 1.0  # for the last lines of its log; a child of its own may keep the pipe open
LOGGER = "headrace.engine"  # of its output that is not a record
EXIT_S = 5.0  # for the process to exit after it closed the socket, or was killed


class ProcessHealth(NamedTuple):
    """What was last received from a process."""

    num_frames: int = 0  # of any kind
    num_heartbeats: int = 0
    num_finished_steps: int = 0
    has_work: bool = False


class EngineProcess:
    """Owns the process and the thread that started it. That thread calls `deliver`, which must not block, with the
    events of one or more steps, and `on_end` once, if a process that was ready ends without `close`."""

    def __init__(
        self,
        deliver: Deliver,
        on_end: Callable[[], None],
        *,
        core: str = LOAD_CORE,
        heartbeat_s: float = HEARTBEAT_S,
        report: Report = lambda stage: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: variables that the process gets beside those of this process."""
        self._deliver = deliver
        self._on_end = on_end
        self._core = core
        self._heartbeat_s = heartbeat_s
        self._report = report
        self._environment = dict(environment or {})
        self._reader = wire.StepReader()
        self._ready: wire.Ready | None = None
        self._failure: HeadraceError | None = None
        self._stats = EngineStats(SchedulerStats(), 0.0, 0.0)
        self._numbers = count()
        self._unanswered: dict[int, Future[Any]] = {}  # by the numbers of their commands
        self._is_closing = False
        self._is_forked = False  # this is a copy of it, in a child of the process that owns it
        self._has_started = threading.Event()  # the process runs, or could not be started
        self._can_run = threading.Event()  # the engine is ready, or has failed
        self.health = ProcessHealth()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = self._connect()
        self._log_copier: threading.Thread | None = None
        # The child asks Linux to kill it with the thread that started it: this one, which lives until the child ends.
        self._thread = threading.Thread(target=self._run, name="headrace-engine-process", daemon=True)
        self._thread.start()
        end_in_forks(self)

    @property
    def stats(self) -> EngineStats:
        """The last snapshot that the engine sent: at most 0.1 s old while it works."""
        return self._stats

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def pid(self) -> int | None:
        self._has_started.wait()
        return None if self._process is None else self._process.pid

    def start(self, config: EngineConfig) -> None:
        """Let the process load the model. Until then it only imports modules."""
        try:
            self._send(wire.Start(config))
        except EngineDeadError:
            pass  # `wait_until_ready` raises the reason

    def wait_until_ready(self) -> wire.Ready:
        """Raises what the start of an engine on a thread would have raised."""
        self._can_run.wait()
        if self._ready is None:
            assert self._failure is not None
            raise self._failure
        return self._ready

    def submit(self, request: Request) -> None:
        """Queue a request. One that could never run is refused here."""
        self._refuse_if_dead()
        if self._ready is None:
            raise EngineDeadError("the engine has not started yet", code="engine_restarting")
        self._ready.checks.check(request)
        try:
            submission = wire.submission(request)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error
        self._send(submission)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(wire.Abort(request_id, index))

    def limit_running(self, num_seqs: int | None) -> None:
        self._send(wire.LimitRunning(num_seqs))

    def forget_prefixes(self) -> None:
        self._send(wire.ForgetPrefixes())

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        return self._ask(lambda number: wire.StartProfile(number, options))

    def stop_profile(self) -> Future[dict[str, Any]]:
        return self._ask(wire.StopProfile)

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        return self._ask(lambda number: wire.LoadAdapter(number, name, path, replaces))

    def unload_adapter(self, name: str) -> Future[None]:
        return self._ask(lambda number: wire.UnloadAdapter(number, name))

    def _ask(self, command: Callable[[int], wire.Command]) -> Future[Any]:
        number = next(self._numbers)
        answer: Future[Any] = Future()
        self._unanswered[number] = answer
        try:
            self._send(command(number))
        except EngineDeadError:
            self._unanswered.pop(number, None)
            raise
        if self._failure is not None:  # it ended just now, perhaps after the last look at the commands
            self._fail_unanswered()
        return answer

    def _fail_unanswered(self) -> None:
        while self._unanswered:
            _, answer = self._unanswered.popitem()
            answer.set_exception(EngineDeadError(f"the engine has stopped: {self._failure}"))

    def close(self) -> None:
        """Stop after the step in flight; requests may stay unfinished. A process that does not stop is killed."""
        if self._is_forked:
            return  # the process and the socket belong to another process
        self._is_closing = True
        try:
            self._channel.send(wire.encode(wire.Close()))
        except OSError:
            pass  # it has ended already
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._kill()
            self._thread.join(EXIT_S)
        self._failure = self._failure or EngineDeadError("it was closed")

    def end_in_fork(self, failure: EngineDeadError) -> None:
        self._is_forked = True
        self._failure = failure

    def kill(self, reason: str, *, dump_stacks: bool = False) -> None:
        """End the process now. `dump_stacks`: let it write the stacks of its threads to its log first."""
        self._failure = self._failure or EngineDeadError(reason)
        if dump_stacks and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            self._thread.join(1.0)  # faulthandler writes at once, without the interpreter
        self._kill()
        self._thread.join(EXIT_S)  # a driver may block its exit for longer, perhaps for ever

    def _send(self, command: wire.Command) -> None:
        self._refuse_if_dead()
        try:
            self._channel.send(wire.encode(command))
        except OSError as error:  # the other thread is about to see its end too
            raise EngineDeadError(f"the engine has stopped: {error}") from error

    def _refuse_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}") from self._failure

    # ---- on the process's thread

    def _run(self) -> None:
        try:
            self._launch()
            self._has_started.set()
            while self._failure is None and (frames := self._channel.receive()) is not None:
                self._take(frames)
        except BaseException as error:  # noqa: BLE001  the engine's edge: waiting threads must be told
            self._failure = self._failure or EngineDeadError(f"the engine's messages could not be read: {error!r}")
        finally:
            self._end()

    # What depends on where the process runs.

    def _connect(self) -> FrameChannel:
        """The front's end of the channel. The process does not run yet."""
        ours, self._theirs = socket.socketpair()
        return Channel(ours)

    def _launch(self) -> None:
        self._process = self._spawn()

    def _wait_for_exit(self) -> EngineDeadError:
        """Returns why the process has ended. The channel is closed at this end."""
        status = None if self._process is None else wait_for(self._process)
        if self._log_copier is not None:
            self._log_copier.join(LAST_LINES_S)
        return EngineDeadError(describe_exit(status))

    def _kill(self) -> None:
        self._has_started.wait()
        if self._process is not None:
            self._process.kill()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._theirs as theirs:
            command = [sys.executable, "-P", "-m", "headrace.engine.process.child"]
            arguments = [str(theirs.fileno()), str(os.getpid()), str(self._heartbeat_s), self._core]
            process = subprocess.Popen(
                [*command, *arguments, *(["json"] if logs.is_json() else [])],
                stdin=subprocess.DEVNULL,
                # To stderr: stdout belongs to the front. As JSON, through this process: not all of it is our text.
                stdout=subprocess.PIPE if logs.is_json() else 2,
                stderr=subprocess.STDOUT if logs.is_json() else None,
                pass_fds=[theirs.fileno()],
                env=child_environment() | self._environment,
            )
        if process.stdout is not None:
            self._log_copier = threading.Thread(
                target=logs.copy_lines, args=(process.stdout, LOGGER), name="headrace-engine-log", daemon=True
            )
            self._log_copier.start()
        return process

    def _take(self, frames: list[bytes]) -> None:
        events: list[SequenceEvent] = []
        for frame in frames:
            self.health = self.health._replace(num_frames=self.health.num_frames + 1)
            match wire.decode_message(frame):
                case wire.Step() as step:
                    events += self._reader.events(step)
                    self._stats = step.stats or self._stats
                case wire.Heartbeat(num_finished_steps=num_steps, has_work=has_work):
                    before = self.health
                    self.health = ProcessHealth(before.num_frames, before.num_heartbeats + 1, num_steps, has_work)
                case wire.Profiled() | wire.AdapterAnswer() as answered:
                    self._answer(answered)
                case wire.Stage(stage=stage):
                    self._report(stage)
                case wire.Ready() as ready:
                    self._ready = ready
                    self._can_run.set()
                case wire.Failed() as failed:
                    self._failure = self._failure or error_of(failed, has_run=self._ready is not None)
        if events:
            self._deliver(events)

    def _answer(self, answered: wire.Profiled | wire.AdapterAnswer) -> None:
        answer = self._unanswered.pop(answered.number, None)
        if answer is None:
            return
        if isinstance(answered, wire.AdapterAnswer):
            if answered.error is None:
                answer.set_result(None)
            else:
                answer.set_exception(AdapterError(answered.error))
        elif answered.result is not None:
            answer.set_result(answered.result)
        else:
            answer.set_exception(ProfilerError(answered.error or "no reason", is_conflict=answered.is_conflict))

    def _end(self) -> None:
        self._channel.hang_up()
        ended = self._wait_for_exit()
        self._failure = self._failure or (EngineDeadError("it was closed") if self._is_closing else ended)
        self._channel.close()
        self._fail_unanswered()
        self._has_started.set()
        self._can_run.set()
        if self._ready is not None and not self._is_closing:
            self._on_end()


def child_environment() -> dict[str, str]:
    """Returns this process's environment, in which the child finds the same package."""
    root = str(Path(headrace.__file__).resolve().parents[1])
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return dict(os.environ)
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{others}" if others else root}


def wait_for(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def describe_exit(status: int | None) -> str:
    if status is None:
        return "its process could not be started"
    if status == -signal.SIGKILL:
        return "its process was killed (SIGKILL), by a user or because the system's memory ran out"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process exited with status {status}; its last lines on stderr may say why"


def error_of(failed: wire.Failed, *, has_run: bool) -> HeadraceError:
    """What the process raised, if it is one of our errors; otherwise an `EngineDeadError` with its text."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, HeadraceError):
        return kind(failed.text)
    return EngineDeadError(f"{'' if has_run else 'it could not start: '}{failed.kind}: {failed.text}")
