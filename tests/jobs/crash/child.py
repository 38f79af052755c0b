"""Runs one job over the fake engine in a forked process, with the failure that an `Order` describes."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from headrace import errors
from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.start import Engine
from headrace.errors import HeadraceError, ResumableJobError
from headrace.jobs import crash_points
from headrace.jobs.input import prepare_process
from headrace.jobs.input.template import LineTemplate
from headrace.jobs.recovery import disk_full
from headrace.jobs.recovery.job_engine import SPARE_SEQUENCES
from headrace.jobs.run import deadline
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.runner.fake import FakeRunner
from headrace.steps import Masks, SlotEntry, StepPlan, StepResult
from headrace.text import Tokenizer
from tests.jobs.conftest import ASCII, starter
from tests.jobs.faults import AT_ONCE

MAX_NUM_SEQS = 4
MAX_IN_FLIGHT = 2 * MAX_NUM_SEQS + SPARE_SEQUENCES
DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the child runs and how it fails. None or empty: no failure of that kind."""

    input: str
    output: str
    options: dict[str, Any] = field(default_factory=dict)  # of JobSpec
    template: dict[str, str] | None = None  # of LineTemplate
    crash_at: str = ""  # a step of `crash_points`
    kill_at_call: int | None = None  # function calls of the job's thread, Python and C functions
    kill_at_step: int | None = None  # of the engine
    term_at_step: int | None = None  # a SIGTERM
    hold_at_step: int | None = None  # the engine waits until the file `go` exists
    max_file_bytes: int | None = None  # file size limit, acts like a full disk
    room_after: int | None = None  # failed writes, after which the limit is lifted
    dies_at_steps: tuple[int, ...] = ()  # steps at which the engine dies, counted over all engines of the process
    poison: tuple[str, ...] = ()  # prompts that kill the engine
    poison_kills: bool = False  # they kill the whole process
    expires_at_step: int | None = None  # the deadline passes at this step
    prepares_in_process: bool = False  # a second process prepares the lines, if there are two cores
    kills_preparer: bool = False  # that process is killed as soon as it was started
    is_nobody: bool = False  # run as user nobody, since root may write everywhere
    has_wild_clock: bool = False
    workers: int = 1  # engines side by side, each on a runner of its own

    @property
    def may_repeat(self) -> bool:
        """Whether a line may be computed twice in one run."""
        return bool(self.dies_at_steps or self.poison)

    @property
    def notes(self) -> Path:
        """Where the child records lines submitted, numbers of calls and steps, and its error."""
        return Path(self.output).parent / "notes"


class OrderedRunner(FakeRunner):
    def __init__(self, order: Order) -> None:
        super().__init__(max_num_seqs=MAX_NUM_SEQS, vocab_size=ASCII)
        self._order = order
        self._died_at: set[int] = set()

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        order = self._order
        if order.poison and any(_text(entry) in order.poison for entry in plan.slot_entries):
            if order.poison_kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("poison")
        if self.num_steps in order.dies_at_steps and self.num_steps not in self._died_at:
            self._died_at.add(self.num_steps)
            raise RuntimeError("the device is gone")
        if self.num_steps == order.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_steps == order.term_at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.num_steps == order.expires_at_step:
            deadline.monotonic = lambda: time.monotonic() + 2 * DAY_SECONDS  # type: ignore[attr-defined]
        if self.num_steps == order.hold_at_step:
            (order.notes / "held").touch()
            while not (order.notes / "go").exists():
                time.sleep(0.001)
        return super().submit(plan, masks)


def _text(entry: SlotEntry) -> str:
    """Its prompt; a preempted sequence has its answer so far after it."""
    return bytes(entry.token_ids[: entry.prompt_len].tolist()).decode()


def run_order(order: Order, tokenizer: Tokenizer) -> int:
    """The exit code that `headrace run` would have."""
    if order.is_nobody and os.geteuid() == 0:
        os.setuid(65_534)
    if order.max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.max_file_bytes, resource.RLIM_INFINITY))
    if order.room_after is not None:
        _make_room_after(order.room_after)
    if order.has_wild_clock:
        _unsettle_clock()
    _watch_preparer(order)
    crash_points.arm(order.crash_at)
    runners = [OrderedRunner(order) for _ in range(order.workers)]
    job = JobSpec(
        input=order.input,
        output=order.output,
        config=EngineConfig(max_num_seqs=MAX_NUM_SEQS),
        template=LineTemplate.of(**order.template) if order.template is not None else None,
        deadline=None if order.expires_at_step is None else "1d",
        workers=order.workers,
        **{"disk_wait_s": 0.0 if order.room_after is None else 1e6, **order.options},
    )
    calls = _Calls(order.kill_at_call)
    sys.setprofile(calls.count)
    try:
        start = [_recording(starter(tokenizer), runner, order) for runner in runners]
        min_lines = 1 if order.prepares_in_process else prepare_process.MIN_LINES_FOR_PROCESS
        code = run_job(job, start=start, rules=AT_ONCE, min_lines_for_process=min_lines, quiet=True).exit_code
    except HeadraceError as error:
        code = 75 if isinstance(error, ResumableJobError) else 1
        _note(order, "error", f"{error}")
    finally:
        sys.setprofile(None)
    _note(order, "counts", f"{calls.num_calls} {max(runner.num_steps for runner in runners)}")
    return code


class _Calls:
    def __init__(self, last: int | None) -> None:
        self.num_calls = 0
        self._last = last

    def count(self, frame: FrameType, event: str, argument: object) -> None:
        self.num_calls += 1
        if self.num_calls == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def _recording(start: Any, runner: FakeRunner, order: Order) -> Any:
    """Records each line before it is submitted. A line with parts, whose ids are `line.attempt.part`, is one line."""

    def started(config: EngineConfig, deliver: Deliver) -> Engine:
        engine: Engine = start(config, deliver, runner=runner)
        descriptor = os.open(order.notes / "submitted", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        submit = engine.client.submit

        def noted(request: Any) -> None:
            index, _, part = request.request_id.partition(".")
            if not part or part.endswith(".0"):
                os.write(descriptor, f"{index}\n".encode())
            submit(request)

        engine.client.submit = noted  # type: ignore[method-assign]
        return engine

    return started


def _watch_preparer(order: Order) -> None:
    """Record that lines were prepared in a second process."""
    spawn = prepare_process.spawn

    def noted(theirs: Any) -> Any:
        process = spawn(theirs)
        _note(order, "preparer", f"{process.pid}")
        if order.kills_preparer:
            process.kill()
        return process

    prepare_process.spawn = noted


def _note(order: Order, name: str, text: str) -> None:
    try:
        (order.notes / name).write_text(text)
    except OSError:
        pass  # the order may be a full disk


def _make_room_after(num_attempts: int) -> None:
    """Lift the file size limit after this many failed writes, without waiting between them."""
    disk_full.TRY_SECONDS = 0.0
    left = iter(range(num_attempts - 1))

    def counted(self: errors.NoRoomError, *arguments: object) -> None:
        Exception.__init__(self, *arguments)
        if next(left, None) is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    errors.NoRoomError.__init__ = counted  # type: ignore[method-assign]


def _unsettle_clock() -> None:
    """Let `time.time` jump by days at each call, mostly backwards."""
    real, jumps = time.time, iter(range(10**9))

    def wild() -> float:
        number = next(jumps)
        return real() + DAY_SECONDS * (number if number % 3 == 0 else -number)

    time.time = wild
