"""Runs a load against a server, in this process or in several, and returns what was seen.

Requests are encoded before the clock starts. Several processes share one clock: a closed loop hands out its requests
from a shared counter, a schedule is dealt out in turn. Ctrl-C ends the load and keeps what was measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any

import msgspec

from headrace.bench.load.bodies import Compatibility, compatibility_warnings, encode_requests
from headrace.bench.load.cost import ClientCost
from headrace.bench.load.driver import NOT_SENT, Driver, Part, Plan, run_in_loop
from headrace.bench.load.loads import ClosedLoop, Load
from headrace.bench.load.target import Target
from headrace.bench.outcomes import STATUSES, Outcome, Status
from headrace.bench.workloads import Workload
from headrace.errors import ConfigError, HeadraceError
from headrace.garbage import collecting_less_often

TIMEOUT_S = 600.0
PROGRESS_INTERVAL_S = 0.5
START_DELAY_S = 0.05  # from the word to start until the common start of several processes
CLIENTS_PER_PROCESS = 512  # of a closed loop, where the number of processes is chosen automatically
CORES_PER_PROCESS = 4  # likewise: most cores are the server's
SPARE_FILES = 64  # open files besides connections


class LoadError(HeadraceError):
    """A load that measured nothing: the server could not be reached, or a client process died."""


@dataclass(frozen=True)
class Progress:
    seconds: float
    counts: Mapping[str, int]  # by status
    num_requests: int | None  # in all; None if the load is limited by time

    @property
    def num_done(self) -> int:
        return sum(self.counts.values())


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class LoadResult:
    """What clients saw. `seconds` is from the start to the last end."""

    outcomes: list[Outcome]  # in the order in which requests were due
    seconds: float
    client: ClientCost
    warnings: list[str] = field(default_factory=list)
    was_interrupted: bool = False
    server_died: bool = False


def run_load(
    address: str,
    workload: Workload,
    load: Load,
    *,
    model_name: str,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    num_processes: int | None = 1,
    compatibility: Compatibility = "vllm",
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Send a workload's requests as a load wants them, and wait for all answers.

    `num_processes=None` chooses by concurrency and cores. Several processes need a `__main__` that can be imported.
    """
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, got {timeout_s!r}")
    if not workload.requests:
        raise ConfigError(f"workload {workload.name!r} has no requests")
    target = Target.parse(address)
    requests = encode_requests(workload, target, model_name, headers=headers, compatibility=compatibility)
    num_processes = processes_for(load) if num_processes is None else num_processes
    plans = split(load, workload, Plan(target, requests, timeout_s), num_processes)
    allow_open_files(most_connections(plans))
    total = _total(plans)
    with collecting_less_often():
        parts, start_at, was_interrupted = (
            _run_here(plans[0], total, on_progress) if len(plans) == 1 else _run_apart(plans, total, on_progress)
        )
    return _result(parts, start_at, load, workload, was_interrupted, compatibility_warnings(workload, compatibility))


def processes_for(load: Load, num_cores: int | None = None) -> int:
    """One process, or more for a closed loop of many clients on a machine with cores to spare."""
    if not isinstance(load, ClosedLoop):
        return 1
    spare = (num_cores or os.cpu_count() or 1) // CORES_PER_PROCESS
    return max(1, min(spare, -(-load.concurrency // CLIENTS_PER_PROCESS)))


def split(load: Load, workload: Workload, base: Plan, num_processes: int) -> list[Plan]:
    """What each process has to send. Never more processes than clients or requests."""
    if num_processes < 1:
        raise ConfigError(f"the number of client processes must be at least 1, got {num_processes}")
    if isinstance(load, ClosedLoop):
        count = load.count(workload)
        num_clients = load.concurrency if count is None else min(load.concurrency, count)
        plan = replace(base, num_requests=count, seconds=load.seconds)
        return [replace(plan, concurrency=share) for share in _shares(num_clients, num_processes)]
    schedule = list(enumerate(load.due_times(workload)))
    schedule.sort(key=lambda entry: entry[1])
    limits: list[int | None] = [None] * min(num_processes, len(schedule))
    if load.max_concurrency is not None:
        limits = list(_shares(load.max_concurrency, len(limits)))
    return [
        replace(base, concurrency=limit, schedule=schedule[index :: len(limits)]) for index, limit in enumerate(limits)
    ]


def _shares(total: int, num_parts: int) -> list[int]:
    """`total` in nearly equal parts, none of them 0."""
    num_parts = min(num_parts, total)
    return [total // num_parts + (index < total % num_parts) for index in range(num_parts)]


def most_connections(plans: Sequence[Plan]) -> int:
    """Of one process at a time."""
    return max(plan.concurrency or len(plan.schedule or ()) for plan in plans)


def allow_open_files(num_connections: int) -> None:
    """Raise this process's limit of open files as far as it may be raised. Its children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class LocalSignals:
    """Signals of a load in one process."""

    def __init__(self, report: Callable[[Mapping[str, int]], None]) -> None:
        self._next, self._counts, self._report = 0, Counter[str](), report
        self._is_stopped = False
        self._reported_at = monotonic()

    def take(self) -> int:
        self._next += 1
        return self._next - 1

    def stop(self) -> None:
        self._is_stopped = True

    def is_stopped(self) -> bool:
        return self._is_stopped

    def count(self, status: Status) -> None:
        self._counts[status] += 1

    def tick(self) -> None:
        if (now := monotonic()) - self._reported_at >= PROGRESS_INTERVAL_S:
            self._reported_at = now
            self._report(self._counts)


def _run_here(plan: Plan, total: int | None, on_progress: OnProgress | None) -> tuple[list[Part], float, bool]:
    start_at = monotonic()

    def report(counts: Mapping[str, int]) -> None:
        if on_progress is not None:
            on_progress(Progress(monotonic() - start_at, dict(counts), total))

    signals = LocalSignals(report)
    with _interrupts(signals.stop):
        part = run_in_loop(Driver(plan, signals, start_at).run())
    return [part], start_at, signals.is_stopped()


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`; the second is an exception as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class SharedSignals:
    """Signals of a load in several processes, over shared memory."""

    def __init__(self, context: Any, num_processes: int) -> None:
        self._next = context.Value("q", 0)
        self._is_stopped = context.Value("b", 0, lock=False)
        # One row of counts per process, so that none of them waits for a lock.
        self._counts = context.Array("q", num_processes * len(STATUSES), lock=False)
        self.start = context.Event()
        self.start_at = context.Value("d", 0.0, lock=False)
        self.row = 0

    def take(self) -> int:
        with self._next.get_lock():
            self._next.value += 1
            return int(self._next.value) - 1

    def stop(self) -> None:
        self._is_stopped.value = 1

    def is_stopped(self) -> bool:
        return bool(self._is_stopped.value)

    def count(self, status: Status) -> None:
        self._counts[self.row * len(STATUSES) + STATUSES.index(status)] += 1

    def tick(self) -> None:
        """The parent reads the counts and reports."""

    def counts(self) -> dict[str, int]:
        return {status: sum(self._counts[place :: len(STATUSES)]) for place, status in enumerate(STATUSES)}


def _run_apart(
    plans: Sequence[Plan], total: int | None, on_progress: OnProgress | None
) -> tuple[list[Part], float, bool]:
    """Run each plan in a process of its own, all from the same start."""
    context = multiprocessing.get_context("spawn")
    signals = SharedSignals(context, len(plans))
    pipes, processes = list[Pipe](), list[Any]()
    for row, plan in enumerate(plans):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_client_process, args=(plan, signals, row, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the death of the process ends the pipe
        pipes.append(ours)
        processes.append(process)
    try:
        with _interrupts(signals.stop):
            for pipe in pipes:
                _received(pipe)  # it is ready
            start_at = signals.start_at.value = monotonic() + START_DELAY_S
            signals.start.set()
            parts = [_part_of(pipe, signals, start_at, total, on_progress) for pipe in pipes]
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
    return parts, start_at, signals.is_stopped()


def _part_of(
    pipe: Pipe, signals: SharedSignals, start_at: float, total: int | None, on_progress: OnProgress | None
) -> Part:
    while not pipe.poll(PROGRESS_INTERVAL_S):
        if on_progress is not None:
            on_progress(Progress(max(0.0, monotonic() - start_at), signals.counts(), total))
    return msgspec.msgpack.decode(_received(pipe), type=Part)


def _received(pipe: Pipe) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        raise LoadError("a client process ended before its load did; its own message is above") from None


def _client_process(plan: Plan, signals: SharedSignals, row: int, pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says so in the signals
    signals.row = row
    gc.freeze()
    pipe.send_bytes(b"ready")
    signals.start.wait()
    with collecting_less_often():
        part = run_in_loop(Driver(plan, signals, signals.start_at.value).run())
    pipe.send_bytes(msgspec.msgpack.encode(part))


def _total(plans: Sequence[Plan]) -> int | None:
    if plans[0].schedule is None:
        return plans[0].num_requests
    return sum(len(plan.schedule or ()) for plan in plans)


def _result(
    parts: Sequence[Part],
    start_at: float,
    load: Load,
    workload: Workload,
    was_interrupted: bool,
    warnings: list[str],
) -> LoadResult:
    deaths = [part.death for part in parts if part.death is not None]
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    errors = deaths + [outcome.error for outcome in outcomes if outcome.status == "failed" and outcome.error]
    if errors and not any(part.has_reached for part in parts):
        raise LoadError(errors[0])
    outcomes.sort(key=lambda outcome: (outcome.due_s, outcome.index))
    num_sent, num_known = len(outcomes), len(workload.requests)
    for outcome in outcomes:
        outcome.chunk_s = [at - start_at for at in outcome.chunk_s]
        outcome.index %= num_known
    lates = None if isinstance(load, ClosedLoop) else [late for part in parts for late in part.lates_s]
    client = ClientCost.of([part.cpu_share for part in parts], [lag for part in parts for lag in part.lags_s], lates)
    seconds = max(part.end_s for part in parts)
    if num_sent > num_known:
        warnings.append(
            f"the workload has {num_known:,} requests and {num_sent:,} were sent: repeated prompts may be cached"
        )
    if workload.spec.ends == "exact" and (num_other := sum(map(partial(_is_other_length, workload), outcomes))):
        warnings.append(
            f"{num_other:,} answers do not have the length that was asked for: the server does not know ignore_eos or "
            "min_tokens, or shortens answers; compare tokens/s and TPOT with care"
        )
    if num_counted := sum(part.num_without_usage for part in parts):
        warnings.append(
            f"{num_counted:,} answers came without usage: their tokens are counted as chunks, which may hold several"
        )
    if deaths:
        num_not_sent = sum(outcome.error == NOT_SENT for outcome in outcomes)
        warnings.append(
            f"the server could not be reached any more ({deaths[0]}): the load was ended after {seconds:.1f} s, and "
            f"{num_not_sent:,} requests that were not sent count as failed"
        )
    if was_interrupted:
        num_cut = sum(part.num_cut for part in parts)
        warnings.append(f"interrupted after {seconds:.1f} s: {num_cut:,} requests in flight are left out")
    return LoadResult(outcomes, seconds, client, warnings, was_interrupted, bool(deaths))


def _is_other_length(workload: Workload, outcome: Outcome) -> bool:
    return outcome.is_ok and outcome.num_output_tokens != workload.requests[outcome.index].output_len
