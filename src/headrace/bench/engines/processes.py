"""Child processes that run engines: started in a session of their own, drained, awaited, stopped, never orphaned.

    this process ──stdin, reply pipe──▶ child (leader of its process group) ──▶ its own children
         │                                ▲ stdout, stderr: a bounded log
         └──pipe──▶ watcher ──────────────┘ kills the group when this process is gone, however it ended

Only the child's own process group is ever signalled, never processes by name. The watcher works by the end of a pipe
and not by PR_SET_PDEATHSIG, which is sent when the thread that started the child ends.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import TypeVar

import psutil

from headrace.bench.engines.base import EngineFailure, FailureKind

Found = TypeVar("Found")

MAX_LOG_LINES = 400
MAX_LINE_CHARS = 8000  # vLLM logs its whole config in one line
TAIL_LINES = 40
POLL_S = 0.05
DRAIN_S = 5.0  # for the rest of the log of a child that has ended; a child of it may keep the log open
STOP_S = 30.0  # from SIGTERM to SIGKILL
GRACE_S = 3.0  # for its own children after its end: they remove shared memory
KILL_S = 10.0
SETTLE_S = 2.0

# Kills the process group `argv[1]` at the end of stdin; a byte before that means: it has ended, leave it alone.
_WATCH = """
import os, signal, sys, time
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
if not os.read(0, 1):
    group = int(sys.argv[1])
    try:
        os.killpg(group, signal.SIGTERM)
        for _ in range(50):
            time.sleep(0.1)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Child:
    """One engine's process and everything that it starts. `stop` must be called; a context manager does."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str | None] | None = None,
        takes_commands: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`env` is added to this process's environment; a variable that is None is removed.
        With `takes_commands` the child's stdin is a pipe."""
        self.name = name
        self.command = list(command)
        self._log: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._log_lock = threading.Lock()
        self._was_stopped = False
        try:
            self._process = subprocess.Popen(
                self.command,
                env={name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None},
                stdin=subprocess.PIPE if takes_commands else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        except OSError as error:
            raise EngineFailure(
                "not_installed", f"{name} cannot be started: {self.command[0]}: {error.strerror or error}"
            ) from error
        try:
            self._watcher = _watch(self.pid)
            self._drain = threading.Thread(target=self._read_log, name=f"{name}-log", daemon=True)
            self._drain.start()
        except BaseException:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            raise
        _RUNNING.add(self)

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def pids(self) -> list[int]:
        """The child and its descendants."""
        try:
            process = psutil.Process(self.pid)
            return [self.pid, *(each.pid for each in process.children(recursive=True))] if self.is_alive else []
        except psutil.NoSuchProcess:
            return []

    # ---- log

    def log_lines(self) -> list[str]:
        with self._log_lock:
            return list(self._log)

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        return "\n".join(self.log_lines()[-num_lines:])

    def find_in_log(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return next((found for line in self.log_lines() if (found := pattern.search(line))), None)

    def settle_log(self) -> None:
        """Wait until what was written so far is in the log: other pipes of the child may be faster."""
        deadline, num_idle = monotonic() + SETTLE_S, 0
        while num_idle < 3 and monotonic() < deadline and self._drain.is_alive():
            assert self._process.stdout is not None
            is_readable, _, _ = select.select([self._process.stdout], [], [], 0)
            num_idle = 0 if is_readable else num_idle + 1
            sleep(0.01)  # the thread that reads gets its turn

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        rest = b""
        try:
            while data := os.read(fd, 1 << 16):
                *lines, rest = re.split(rb"[\r\n]+", rest + data)  # progress bars end in \r
                rest = rest[-MAX_LINE_CHARS:]
                self._add(lines)
        except (OSError, ValueError):
            pass
        self._add([rest])

    def _add(self, lines: Sequence[bytes]) -> None:
        texts = [line.decode(errors="replace")[:MAX_LINE_CHARS].rstrip() for line in lines]
        with self._log_lock:
            self._log.extend(text for text in texts if text)

    # ---- commands

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None, "a child that takes no commands"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self.failure("when it was given work") from error

    def end_commands(self) -> None:
        """Close its stdin, after which a worker ends by itself."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    # ---- waiting

    def wait_until(self, look: Callable[[], Found | None], *, timeout_s: float) -> Found:
        """Call `look` until it finds something. Raises as soon as the child ends, or after `timeout_s`."""
        deadline = monotonic() + timeout_s
        while True:
            if (found := look()) is not None:
                return found
            if not self.is_alive:
                self._drain.join(DRAIN_S)
                if (found := look()) is not None:  # said just before it ended
                    return found
                raise self.failure("before it was ready")
            if monotonic() > deadline:
                raise EngineFailure("timeout", f"{self.name} was not ready after {timeout_s:g} s", self.log_tail())
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)

    def failure(self, when: str) -> EngineFailure:
        """The failure of a child that ended, or that does not talk any more."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._drain.join(DRAIN_S)
        return failure_of(self.name, self.exit_code, self.log_lines(), when)

    # ---- the end

    def stop(self, timeout_s: float = STOP_S, *, ends_itself_s: float = 0.0) -> None:
        """SIGTERM to the process group, SIGKILL after `timeout_s`. Returns when all its processes are gone.

        With `ends_itself_s` its stdin is closed first, and it may end by itself.
        """
        if self._was_stopped:
            return
        self._was_stopped = True
        others = _descendants(self.pid)
        try:
            if ends_itself_s:
                self.end_commands()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(ends_itself_s)
            if self.is_alive:
                _signal_group(self.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
            psutil.wait_procs(others, GRACE_S)
        finally:  # also when Ctrl-C interrupts the wait
            _signal_group(self.pid, signal.SIGKILL)
            for process in others:  # those that have left the group
                with suppress(psutil.Error):
                    process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
            psutil.wait_procs(others, KILL_S)
            self._end_watcher()
            self._drain.join(KILL_S)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            _RUNNING.discard(self)

    def _end_watcher(self) -> None:
        assert self._watcher.stdin is not None
        with suppress(OSError):
            self._watcher.stdin.write(b"x")
            self._watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._watcher.wait(KILL_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_RUNNING: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for child in list(_RUNNING):
        child.stop(timeout_s=5.0)


def _watch(group: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(group)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
        os.killpg(group, number)


# ---- what a failure was

_OOM = (
    r"out of memory",
    r"OutOfMemoryError",
    r"MemoryError\b",
    r"std::bad_alloc",
    r"can.t allocate memory",
    r"cannot allocate memory",
    r"not enough memory",
    r"No available memory for the cache blocks",
    r"KV cache is needed, which is larger than the available",
    r"is less than desired (GPU|CPU) memory utilization",
    r"(larger|greater) than the (maximum|total) number of tokens (that can be stored )?in (the )?KV cache",
    r"insufficient memory",
    # Headrace
    r"leave no room for a KV cache",
    r"the GPU has no room for",
    r"needs [\d,]+ tokens of KV cache, and there is room for",
    r"it does not fit into [\d,.]+ GiB of memory",
)
_BAD_SETTING = (
    r"error: unrecognized arguments",
    r"error: argument ",
    r"invalid choice",
    r"ConfigError",
    r"ValidationError",
    r"validation errors? for",
    r"unexpected keyword argument",
    r"headrace( serve)?: error:",
    r"Model(NotFound)?Error",
    r"RequestError",  # a context that is too short for the workload
    r"(Value|Key|Type|NotImplemented|Assertion)Error: ",
    r"is not a valid model identifier",
    r"Repo id must",
    r"error: ",
)
_NOT_INSTALLED = (r"ModuleNotFoundError: No module named '(?:vllm|headrace)'", r"No module named (?:vllm|headrace)")
_NOISE = re.compile(
    r"\x1b\[[0-9;]*m"  # colours
    r"|^\([A-Za-z_0-9]+ pid=\d+\)\s*"  # vLLM's process names
    r"|^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*"
)
_KINDS: tuple[tuple[FailureKind, tuple[re.Pattern[str], ...]], ...] = (
    ("not_installed", tuple(map(re.compile, _NOT_INSTALLED))),
    ("oom", tuple(re.compile(text, re.IGNORECASE) for text in _OOM)),
    ("bad_setting", tuple(map(re.compile, _BAD_SETTING))),
)
USAGE_EXIT_CODE = 2


def failure_of(name: str, exit_code: int | None, lines: Sequence[str], when: str) -> EngineFailure:
    """What a process that ended died of, by its exit code and its log."""
    kind, why = classify(exit_code, lines)
    ended = "stopped talking" if exit_code is None else f"ended ({_ending(exit_code)})"
    return EngineFailure(kind, f"{name} {ended} {when}" + (f": {why}" if why else ""), "\n".join(lines[-TAIL_LINES:]))


def classify(exit_code: int | None, lines: Sequence[str]) -> tuple[FailureKind, str]:
    """The kind of a failure, and the line of the log that says so."""
    cleaned = [plain(line) for line in lines]
    for kind, patterns in _KINDS:
        for index in reversed(range(len(cleaned))):
            if any(pattern.search(cleaned[index]) for pattern in patterns):
                return kind, _with_details(cleaned, index)
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "oom", "it was killed, which the system does when memory runs out"
    if exit_code == USAGE_EXIT_CODE:
        return "bad_setting", cleaned[-1].strip() if cleaned else ""
    return "crash", cleaned[-1].strip() if cleaned else ""


def _with_details(lines: Sequence[str], index: int) -> str:
    """A line; and the two after "1 validation error for ...", which say what is wrong."""
    count = 3 if "validation error" in lines[index] else 1
    return " ".join(line.strip() for line in lines[index : index + count])


def plain(line: str) -> str:
    """A line of a log without colours and prefixes."""
    before = ""
    while line != before:
        before, line = line, _NOISE.sub("", line)
    return line


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with suppress(ValueError):
        return signal.Signals(-exit_code).name
    return f"signal {-exit_code}"


def shown(command: Sequence[str]) -> str:
    """A command line as a user would type it."""
    return shlex.join(command)
