"""The failure log of a job, `trouble.jsonl`: what failed and what was done about it. Appended only on failures.

It does not affect results, which are in the journal. A record that is torn or cannot be written only loses a count.
Fields whose names differ from the keys on disk name their key, so that logs of earlier versions stay readable.
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


# The number of a worker that is not the first. The first one is left out on disk, as in the log of a job with one.
LaterWorker = int | msgspec.UnsetType
LATER_WORKER: LaterWorker = msgspec.field(name="worker", default=msgspec.UNSET)


class Trial(msgspec.Struct, frozen=True):
    """Lines that run with no others beside them, to find out whether one of them kills the engine. If the first half of
    a group that killed the engine does not, then the other half does."""

    lines: list[int] = msgspec.field(name="rows")
    is_other_half: bool = msgspec.field(name="is_twin", default=False)
    num_lines: int = msgspec.field(name="num_rows", default=1)  # when the trial started; lines that are done leave it
    evidence: int = 0  # against a line that ran alone from the start of its trial


class Suspicion(msgspec.Struct, frozen=True):
    last: list[int] = []  # lines in flight at the last death, if no trial was running
    trials: list[Trial] = []  # a stack: the last one runs next


class Retry(msgspec.Struct, frozen=True, tag_field="what", tag="retry"):
    line: int = msgspec.field(name="row")
    cause: str


class EngineDeath(msgspec.Struct, frozen=True, tag_field="what", tag="death"):
    loss: Loss
    reason: str
    lines: list[int] = msgspec.field(name="rows")  # in flight
    num_done: int  # lines of the job
    suspicion: Suspicion  # after this death
    num_idle: int = 0  # consecutive deaths, this one included, without progress: no line done, no suspicion narrowed
    epoch: int | None = None  # of the process that was lost
    later_worker: LaterWorker = LATER_WORKER  # whose engine it was, and whose suspicion; a later run may have fewer

    @property
    def worker(self) -> int:
        return self.later_worker or 0


class PoisonLine(msgspec.Struct, frozen=True, tag_field="what", tag="poison"):
    line: int = msgspec.field(name="row")
    num_answered: int  # lines of the job at that time


class PoisonRequest(msgspec.Struct, frozen=True, tag_field="what", tag="poison-request"):
    """The request of a line that kills the engine: later lines with the same request are refused without a search."""

    digest: str


class MemoryStep(msgspec.Struct, frozen=True, tag_field="what", tag="memory"):
    """A step of the memory ladder: the device ran out of memory, and the engine restarts with other settings."""

    rung: str
    given: dict[str, Any]  # the user's settings; if they change, the ladder starts over
    settings: dict[str, Any]  # that replace them
    num_done: int  # lines of the job at that time
    later_worker: LaterWorker = LATER_WORKER

    @property
    def worker(self) -> int:
        return self.later_worker or 0


Event = Retry | EngineDeath | PoisonLine | PoisonRequest | MemoryStep


class _Entry(msgspec.Struct, frozen=True):
    epoch: int
    pass_number: int = msgspec.field(name="turn")
    event: Event


@dataclass(frozen=True)
class FailureCounts:
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    deaths: dict[str, int] = field(default_factory=dict)  # by loss
    poison_rows: int = 0  # lines that kill the engine; the name is a key of JSON outputs
    memory_rungs: list[str] = field(default_factory=list)

    @property
    def status_fields(self) -> dict[str, Any]:
        """The fields of `JobStatus` that count failures."""
        return {
            "retries": self.retries,
            "engine_deaths": self.deaths,
            "poison_rows": self.poison_rows,
            "memory_rungs": self.memory_rungs,
        }


class FailureLog:
    """Owned by the process that runs the job. `events` are those of the current pass, oldest first."""

    def __init__(self, path: Path | None, *, epoch: int = 1, first_epoch: int = 0, pass_number: int = 1) -> None:
        """`path`: without one, events are kept in memory only."""
        self._path = path
        self._epoch = epoch
        self._pass_number = pass_number
        self._encoder = msgspec.json.Encoder()
        self._counter = _Counter()
        self.events: list[Event] = []  # without retries, which may be many
        self.num_retries: Counter[int] = Counter()  # by line
        for entry in read_entries(path) if path is not None else ():
            if entry.epoch >= first_epoch and entry.pass_number == pass_number:
                self._take(entry.event)

    def append(self, event: Event) -> None:
        self._take(event)
        if self._path is not None:
            data = self._encoder.encode(_Entry(self._epoch, self._pass_number, event)) + b"\n"
            try:
                _append(self._path, data, is_synced=not isinstance(event, Retry))
            except OSError:
                pass  # the journal reports a disk that is full or broken

    def forget_done(self, line: int) -> None:
        """Stop counting the retries of a line that is done."""
        self.num_retries.pop(line, None)

    @property
    def counts(self) -> FailureCounts:
        return self._counter.counts

    @property
    def has_lost_process(self) -> bool:
        return any(isinstance(event, EngineDeath) and event.loss != "engine" for event in self.events)

    def last_death(self) -> EngineDeath | None:
        return next((event for event in reversed(self.events) if isinstance(event, EngineDeath)), None)

    def last_deaths(self) -> list[EngineDeath]:
        """The last death of each worker that lost an engine."""
        return list({event.worker: event for event in self.events if isinstance(event, EngineDeath)}.values())

    def _take(self, event: Event) -> None:
        self._counter.add(event)
        if isinstance(event, Retry):
            self.num_retries[event.line] += 1
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
            case Retry(cause=cause):
                self._retries[cause] += 1
            case EngineDeath(loss=loss):
                self._deaths[loss] += 1
            case PoisonLine():
                self._num_poison += 1
            case MemoryStep(rung=rung):
                self._rungs.append(rung)

    @property
    def counts(self) -> FailureCounts:
        return FailureCounts(dict(self._retries), dict(self._deaths), self._num_poison, list(self._rungs))


def counts_of(directory: Path, *, first_epoch: int) -> FailureCounts:
    """Counts over all passes, for `job_view`."""
    counter = _Counter()
    for entry in read_entries(directory / FAILURE_LOG_NAME):
        if entry.epoch >= first_epoch:
            counter.add(entry.event)
    return counter.counts


def read_entries(path: Path) -> list[_Entry]:
    """All complete entries of the log."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    decoder, entries = msgspec.json.Decoder(_Entry), []
    for text in data.splitlines():
        try:
            entries.append(decoder.decode(text))
        except (msgspec.MsgspecError, UnicodeError):
            pass  # torn
    return entries


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
