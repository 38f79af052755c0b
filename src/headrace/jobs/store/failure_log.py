"""The failure log of a job, `trouble.jsonl`: what failed and what was done about it. Appended only on failures.

It does not affect results, which are in the journal. A record that is torn or cannot be written only loses a count.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.jobs.files import sync_data

FAILURE_LOG_NAME = "trouble.jsonl"

# How an engine was lost: by an exception, with the context of its device, or with the whole process of the job.
Loss = Literal["engine", "device", "process"]


class Trial(msgspec.Struct, frozen=True):
    """Lines that run with no others beside them, to find out whether one of them kills the engine."""

    rows: list[int]
    is_twin: bool = False  # second half of a group that killed the engine: if the first half does not, this one does
    num_rows: int = 1  # when the trial started; lines that are done leave it
    evidence: int = 0  # against a line that ran alone from the start of its trial


class Suspicion(msgspec.Struct, frozen=True):
    last: list[int] = []  # lines in flight at the last death, if no trial was running
    trials: list[Trial] = []  # a stack: the last one runs next


class Retried(msgspec.Struct, frozen=True, tag_field="what", tag="retry"):
    row: int
    cause: str


class Died(msgspec.Struct, frozen=True, tag_field="what", tag="death"):
    loss: Loss
    reason: str
    rows: list[int]  # in flight
    num_done: int  # lines of the job
    suspicion: Suspicion  # after this death
    num_idle: int = 0  # consecutive deaths, this one included, without progress: no line done, no suspicion narrowed
    epoch: int | None = None  # of the process that was lost


class Convicted(msgspec.Struct, frozen=True, tag_field="what", tag="poison"):
    row: int
    num_answered: int  # lines of the job at that time


class Refused(msgspec.Struct, frozen=True, tag_field="what", tag="poison-request"):
    """The request of a line that kills the engine: later lines with the same request are refused without a search."""

    digest: str


class Climbed(msgspec.Struct, frozen=True, tag_field="what", tag="memory"):
    """A step of the memory ladder: the device ran out of memory, and the engine restarts with other settings."""

    rung: str
    given: dict[str, Any]  # the user's settings; if they change, the ladder starts over
    settings: dict[str, Any]  # that replace them
    num_done: int  # lines of the job at that time


Event = Retried | Died | Convicted | Refused | Climbed


class _Line(msgspec.Struct, frozen=True):
    epoch: int
    turn: int  # the pass over the input
    event: Event


@dataclass(frozen=True)
class FailureCounts:
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    deaths: dict[str, int] = field(default_factory=dict)  # by loss
    poison_rows: int = 0
    memory_rungs: list[str] = field(default_factory=list)

    @property
    def status_fields(self) -> dict[str, Any]:
        """Of `JobStatus`."""
        return {
            "retries": self.retries,
            "engine_deaths": self.deaths,
            "poison_rows": self.poison_rows,
            "memory_rungs": self.memory_rungs,
        }


class FailureLog:
    """Owned by the process that runs the job. `events` are those of the current pass, oldest first."""

    def __init__(self, path: Path | None, *, epoch: int = 1, first_epoch: int = 0, turn: int = 1) -> None:
        """Without a path, events are kept in memory only."""
        self._path = path
        self._epoch = epoch
        self._turn = turn
        self._encoder = msgspec.json.Encoder()
        self._counter = _Counter()
        self.events: list[Event] = []  # without retries, which may be many
        self.num_retries: Counter[int] = Counter()  # by line
        for line in read_lines(path) if path is not None else ():
            if line.epoch >= first_epoch and line.turn == turn:
                self._take(line.event)

    def append(self, event: Event) -> None:
        self._take(event)
        if self._path is not None:
            data = self._encoder.encode(_Line(self._epoch, self._turn, event)) + b"\n"
            try:
                _append(self._path, data, is_synced=not isinstance(event, Retried))
            except OSError:
                pass  # the journal reports a disk that is full or broken

    def forget_done(self, row: int) -> None:
        """Its retries are no longer counted."""
        self.num_retries.pop(row, None)

    @property
    def counts(self) -> FailureCounts:
        return self._counter.counts

    @property
    def has_lost_process(self) -> bool:
        return any(isinstance(event, Died) and event.loss != "engine" for event in self.events)

    def last_death(self) -> Died | None:
        return next((event for event in reversed(self.events) if isinstance(event, Died)), None)

    def _take(self, event: Event) -> None:
        self._counter.add(event)
        if isinstance(event, Retried):
            self.num_retries[event.row] += 1
        else:
            self.events.append(event)


class _Counter:
    def __init__(self) -> None:
        self._retries: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        self._num_poison = 0
        self._rungs: list[str] = []

    def add(self, event: Event) -> None:
        match event:
            case Retried(cause=cause):
                self._retries[cause] += 1
            case Died(loss=loss):
                self._deaths[loss] += 1
            case Convicted():
                self._num_poison += 1
            case Climbed(rung=rung):
                self._rungs.append(rung)

    @property
    def counts(self) -> FailureCounts:
        return FailureCounts(dict(self._retries), dict(self._deaths), self._num_poison, list(self._rungs))


def counts_of(directory: Path, *, first_epoch: int) -> FailureCounts:
    """Counts over all passes, for `job_view`."""
    counter = _Counter()
    for line in read_lines(directory / FAILURE_LOG_NAME):
        if line.epoch >= first_epoch:
            counter.add(line.event)
    return counter.counts


def read_lines(path: Path) -> list[_Line]:
    """All complete lines of the log."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    decoder, lines = msgspec.json.Decoder(_Line), []
    for text in data.splitlines():
        try:
            lines.append(decoder.decode(text))
        except (msgspec.MsgspecError, UnicodeError):
            pass  # torn
    return lines


def _append(path: Path, data: bytes, *, is_synced: bool) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data  # a record torn by a crash stays on a line of its own
        os.write(descriptor, data)
        if is_synced:
            sync_data(descriptor)
    finally:
        os.close(descriptor)
