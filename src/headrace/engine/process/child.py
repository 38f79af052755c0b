"""The process of an engine. The front runs `python -m headrace.engine.process.child SOCKET PARENT HEARTBEAT_S CORE`,
with `json` at the end if its log is JSON.

    main thread    loads the core, then runs its loop; sends a frame for each step with events
    reader thread  puts commands into the loop's inbox, and sends heartbeats

It ends when it is told to, when its engine fails, and when its front has gone for any reason.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from headrace.engine.loop import EngineLoop, could_not_take
from headrace.engine.process import wire
from headrace.engine.process.channel import Channel, FrameChannel
from headrace.engine.process.engine_process import LOAD_CORE
from headrace.errors import EngineDeadError, HeadraceError, RequestError
from headrace.garbage import freeze_loaded_objects
from headrace.hardware import shorten_openmp_waits
from headrace.logs import set_up_logs
from headrace.parent_death import die_with
from headrace.startup import OnStage, StartupStage, StartupStages
from headrace.types import SequenceEvent

if TYPE_CHECKING:
    from headrace.config import EngineConfig
    from headrace.engine.start import LoadedCore

    Load = Callable[[EngineConfig, OnStage], LoadedCore]

STATS_S = 0.1  # between two snapshots of the counters; another one is sent when the engine runs out of work
MAX_BACKLOG_BYTES = 64 << 20  # of events; an engine whose front reads nothing waits then
DRAIN_S = 5.0  # for the front to read the last messages
CONFIG_WAIT_S = 0.2  # in which a front opens a model that it need not download
GATHER_S = 0.002  # a busy front sends requests of one burst 0.3 to 0.7 ms apart
PREFIX = "engine: "

_STDERR = 2
_log = logging.getLogger("headrace.engine.process.child")  # the same name when this is the main module


class EngineChild:
    """An engine at the other end of a channel. The front controls it."""

    def __init__(self, channel: FrameChannel, heartbeat_s: float) -> None:
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._writer = wire.StepWriter()
        self._starts: SimpleQueue[wire.Start] = SimpleQueue()  # only one arrives
        self._loop: EngineLoop | None = None
        self._before_loop: list[wire.Command] = []  # that arrived while the model was loading
        self._hand_over = threading.Lock()
        self._stats_at = 0.0

    def run(self, core_path: str) -> int:
        """Returns the exit status."""
        threading.Thread(target=self._read, name="headrace-reader", daemon=True).start()
        stages = StartupStages(self._send_stage)
        try:
            stages("import")
            load = _imported(core_path)
            loaded = load(self._config(core_path, stages), stages)
            stages.end()
        except BaseException as error:  # noqa: BLE001  the front raises it
            self._report(error, is_expected=isinstance(error, HeadraceError) and not os.environ.get("HEADRACE_DEBUG"))
            return 1
        freeze_loaded_objects()
        self._channel.send(wire.encode(wire.Ready(loaded.settings, loaded.core.checks)))
        loop = EngineLoop(
            loaded.core, self._after_step, self._report, batching_delay_s=GATHER_S, profiler=loaded.profiler
        )
        with self._hand_over:
            self._loop = loop
            for command in self._before_loop:
                self._execute(loop, command)
        loop.run()
        return 0 if loop.failure is None else 1

    def _config(self, core_path: str, stages: StartupStages) -> EngineConfig:
        """Wait for the config. If it does not come soon, the front downloads the model, and torch is imported
        meanwhile; else later, beside what else a start begins (`engine/early_start.py`)."""
        try:
            return self._starts.get(timeout=CONFIG_WAIT_S).config
        except Empty:
            if core_path == LOAD_CORE:
                shorten_openmp_waits()
                importlib.import_module("torch")
            stages.end()
            return self._starts.get().config

    def _send_stage(self, stage: StartupStage) -> None:
        self._channel.send(wire.encode(wire.Stage(stage)))

    def _read(self) -> None:
        heartbeat_at = monotonic()
        while True:
            frames = self._channel.receive(max(0.0, heartbeat_at - monotonic()))
            if frames is None:  # the front has gone
                os._exit(0)
            for frame in frames:
                self._take(wire.decode_command(frame))
            if monotonic() >= heartbeat_at:
                heartbeat_at = monotonic() + self._heartbeat_s
                self._send_heartbeat()

    def _take(self, command: wire.Command) -> None:
        with self._hand_over:
            if isinstance(command, wire.Start):
                self._starts.put(command)
            elif self._loop is not None:
                self._execute(self._loop, command)
            elif isinstance(command, wire.Close):
                os._exit(0)
            else:
                self._before_loop.append(command)

    def _execute(self, loop: EngineLoop, command: wire.Command) -> None:
        try:
            if isinstance(command, wire.StartProfile):
                loop.start_profile(command.options).add_done_callback(self._answer_of(command.number))
            elif isinstance(command, wire.StopProfile):
                loop.stop_profile().add_done_callback(self._answer_of(command.number))
            elif isinstance(command, wire.LoadAdapter):
                loading = loop.load_adapter(command.name, command.path, replaces=command.replaces)
                loading.add_done_callback(self._adapter_answer_of(command.number))
            elif isinstance(command, wire.UnloadAdapter):
                loop.unload_adapter(command.name).add_done_callback(self._adapter_answer_of(command.number))
            else:
                _dispatch(loop, command)
        except EngineDeadError:
            pass  # a Failed message says why

    def _answer_of(self, number: int) -> Callable[[Future[dict[str, Any]]], None]:
        def send(done: Future[dict[str, Any]]) -> None:
            error = done.exception()
            if error is None:
                answer = wire.Profiled(number, done.result(), None)
            else:
                answer = wire.Profiled(number, None, str(error), getattr(error, "is_conflict", False))
            self._send_answer(answer)

        return send

    def _adapter_answer_of(self, number: int) -> Callable[[Future[None]], None]:
        def send(done: Future[None]) -> None:
            error = done.exception()
            self._send_answer(wire.AdapterAnswer(number, None if error is None else str(error)))

        return send

    def _send_answer(self, answer: wire.EngineMessage) -> None:
        try:
            self._channel.send(wire.encode(answer))
        except OSError:
            pass  # the front has gone

    def _send_heartbeat(self) -> None:
        loop = self._loop
        num_steps, has_work = (0, False) if loop is None else (loop.num_finished_steps, loop.has_work)
        try:
            self._channel.send(wire.encode(wire.Heartbeat(num_steps, has_work)))
        except OSError:
            os._exit(0)

    def _after_step(self, events: list[SequenceEvent]) -> None:
        assert self._loop is not None
        stats, now = None, monotonic()
        if now >= self._stats_at + STATS_S or not self._loop.has_work:
            stats, self._stats_at = self._loop.stats, now
        if events or stats is not None:
            self._channel.send(wire.encode(self._writer.step(events, stats)))

    def _report(self, error: BaseException, *, is_expected: bool = False) -> None:
        if not is_expected:  # the front prints an expected one, such as a wrong setting, in one line
            _log.error("the engine has failed", exc_info=error)
        try:
            text = str(error).encode(errors="replace").decode()  # it may contain a path that is not valid UTF-8
            self._channel.send(wire.encode(wire.Failed(type(error).__name__, text)))
        except OSError:
            pass  # the front has gone too


def _dispatch(loop: EngineLoop, command: wire.Command) -> None:
    match command:
        case wire.Submit():
            try:
                loop.accept(wire.request_of(command))  # `EngineProcess.submit` has checked it
            except RequestError as error:
                loop.refuse(command.request_id, str(error))
            except EngineDeadError:
                raise
            except Exception as error:  # noqa: BLE001  one bad request must not end the engine
                _log.exception("a request could not be submitted")
                loop.refuse(command.request_id, could_not_take(error))
        case wire.Abort():
            loop.abort(command.request_id, command.index)
        case wire.LimitRunning():
            loop.limit_running(command.num_seqs)
        case wire.ForgetPrefixes():
            loop.forget_prefixes()
        case wire.Close():
            loop.stop()
        case _:
            raise AssertionError("not for the loop")


def _imported(path: str) -> Load:
    """The function `module:name`."""
    module, name = path.split(":")
    load: Load = getattr(importlib.import_module(module), name)
    return load


class _Prefixed(io.TextIOBase):
    """Writes a prefix before each line."""

    def __init__(self, out: TextIO, prefix: str) -> None:
        self._out, self._prefix = out, prefix
        self._is_line_start = True

    def write(self, text: str) -> int:
        for line in re.findall(r".*\n|.+", text):
            self._out.write(self._prefix + line if self._is_line_start else line)
            self._is_line_start = line.endswith("\n")
        self._out.flush()
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()


def ignore_stop_signals() -> None:
    """A terminal or a service manager signals the whole process group; only the front knows whether to drain first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable(_STDERR)
    faulthandler.register(signal.SIGUSR1, _STDERR, all_threads=True)  # a hung engine then writes its stacks to the log


def set_up_output(prefix: str, *, is_json: bool) -> None:
    """Write everything to stderr: as JSON, or with a prefix before each line."""
    if is_json:
        set_up_logs("json")
        sys.stdout = sys.stderr
    else:
        sys.stdout = sys.stderr = _Prefixed(sys.stderr, prefix)
        logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("headrace").setLevel(logging.INFO)


def main(argv: list[str]) -> int:
    fd, parent, heartbeat_s, core, *log_format = argv
    die_with(int(parent))
    ignore_stop_signals()
    set_up_output(PREFIX, is_json=log_format == ["json"])
    channel = Channel(socket.socket(fileno=int(fd)), max_backlog_bytes=MAX_BACKLOG_BYTES)
    status = EngineChild(channel, float(heartbeat_s)).run(core)
    channel.drain(DRAIN_S)
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without the exit handlers of libraries
