"""The status of a job in `status.json`, readable at any time: the file is replaced, never changed in place.

The names of fields are the keys of the file and must not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec

from headrace.errors import JobError
from headrace.jobs.files import is_no_room

STATUS_NAME = "status.json"
MIN_SECONDS = 1.0  # between two writes

WorkerState = Literal["running", "starting", "lost"]  # lost: the job goes on without it
JobState = Literal["running", "paused", "finished", "stopped", "expired", "failed"]


@dataclass(frozen=True, kw_only=True)
class TokenRates:
    """Tokens per second."""

    prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What did not have to be computed, and why."""

    prefix_tokens: int = 0  # prompt tokens that were in the prefix cache
    duplicate_lines: int = 0
    duplicate_prompt_tokens: int = 0
    duplicate_completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """One GPU now, and in this run so far, all processes on it included. None: it does not report the figure."""

    index: int
    name: str
    utilization: float | None = None  # share of time with a kernel running
    memory_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_mean: float | None = None
    utilization_max: float | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    memory_peak_bytes: float | None = None
    memory_total_bytes: float | None = None
    temperature_max_c: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One of several workers of a job."""

    number: int
    state: WorkerState
    lines_done: int = 0  # in this run
    sequences_running: int = 0
    sequences_waiting: int = 0
    kv_use: float = 0.0
    rates_now: TokenRates = field(default_factory=TokenRates)
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Shares are between 0 and 1, times in seconds; None: unknown, or not known yet."""

    state: JobState
    output: str
    model: str
    pid: int
    started_at: float  # seconds since the Unix epoch, like `updated_at`
    updated_at: float
    seconds: float
    lines_total: int | None
    lines_done: int
    lines_before: int = 0  # of `lines_done`, those of earlier runs; all other counts are of this run
    lines_answered: int
    lines_failed: int
    lines_in_flight: int
    lines_ready: int  # prepared, not submitted
    errors: dict[str, int] = field(default_factory=dict)  # by code
    error_lines: dict[str, int] | None = None  # in the journal, by code, of all runs; None if lines are repeated
    lines_held: int = 0  # of `lines_done`, those not written because the disk is full
    epoch: int | None = None  # this and `journal_bytes`: the state of the journal that the counts belong to
    journal_bytes: int | None = None
    prompt_tokens: int = 0  # of answered lines
    completion_tokens: int = 0
    rates_now: TokenRates = field(default_factory=TokenRates)
    rates_mean: TokenRates = field(default_factory=TokenRates)
    prefix_hit_share: float = 0.0
    kv_use: float = 0.0
    sequences_running: int = 0
    sequences_waiting: int = 0
    saved: Saved = field(default_factory=Saved)
    tokens_left: int | None = None
    seconds_left: float | None = None
    limited_by: str | None = None
    limited_because: str | None = None
    gpu_seconds: float | None = None
    cost: float | None = None  # in the currency of --gpu-price
    gpus: list[GpuStatus] = field(default_factory=list)
    gpus_missing: str | None = None  # why there are no figures of GPUs now
    paused_because: str | None = None
    retries: dict[str, int] = field(default_factory=dict)  # by cause; this and the next three are of all runs
    engine_deaths: dict[str, int] = field(default_factory=dict)  # by what was lost: engine, device or process
    poison_rows: int = 0  # lines that kill the engine; the name is a key of JSON outputs
    memory_rungs: list[str] = field(default_factory=list)  # steps of the memory ladder, in order
    workers: list[WorkerStatus] = field(default_factory=list)  # empty if there is only one
    workers_desired: int | None = None  # that the deadline needs and that have something to do
    suspects: int = 0  # lines that run in isolation, since one of them may kill the engine


class StatusFile:
    """A failed write does not stop the job: `failure` says why the file is old."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._clock = clock
        self._written_at: float | None = None
        self.failure: OSError | None = None

    def write(self, status: JobStatus, *, now: bool = False) -> None:
        """Write at most once per second, except with `now`."""
        if self._path is None:
            return
        if not now and self._written_at is not None and self._clock() - self._written_at < MIN_SECONDS:
            return
        self._written_at = self._clock()
        try:
            self._path.parent.mkdir(exist_ok=True)
            write_status(self._path, status)
            self.failure = None
        except OSError as error:
            self.failure = error


def write_status(path: Path, status: JobStatus) -> None:
    """Readers see the old status or the new one, never a part."""
    draft = path.with_name(f"{path.name}.tmp")
    data = msgspec.json.format(msgspec.json.encode(status)) + b"\n"
    try:
        draft.write_bytes(data)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if not is_no_room(error):
            raise
        _write_over(path, data)
        return
    os.replace(draft, path)


def _write_over(path: Path, data: bytes) -> None:
    """A full disk has no space for another file, but the space of the old one can be reused."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, data.ljust(os.fstat(descriptor).st_size), 0)
    finally:
        os.close(descriptor)


def read_status(path: Path) -> JobStatus:
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobStatus)
    except OSError as error:
        raise JobError(f"the status {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise JobError(f"{path} is not the status of a job: {error}") from error
