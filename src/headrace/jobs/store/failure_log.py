"""What went wrong in a job and what was done about it: `trouble.jsonl`, appended to on failures and never else.

It decides nothing about results: those are in the journal. A record that is torn or cannot be written costs a count.
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

# How an engine was lost: by an exception, with its device's context, or with the whole process of the job.
Loss = Literal["engine", "device", "process"]


class Trial(msgspec.Struct, frozen=True):
    """Rows that are to run with no others beside them."""

    rows: list[int]
    is_twin: bool = False  # the other half of a group that killed the engine; if that half does not, this one must
    num_rows: int = 1  # when it began: those that are done leave it
    evidence: int = 0  # against a row that was alone from the beginning


class Suspicion(msgspec.Struct, frozen=True):
    last: list[int] = []  # in flight at the last death, while no trial went on
    trials: list[Trial] = []  # the last one is the next


class Retried(msgspec.Struct, frozen=True, tag_field="what", tag="retry"):
    row: int
    cause: str


class Died(msgspec.Struct, frozen=True, tag_field="what", tag="death"):
    loss: Loss
    reason: str
    rows: list[int]  # in flight
    num_done: int  # rows of the job
    suspicion: Suspicion  # after it
    num_idle: int = 0  # deaths in a row, this one included, without a row done or a suspicion narrowed
    epoch: int | None = None  # of the process that was lost


class Convicted(msgspec.Struct, frozen=True, tag_field="what", tag="poison"):
    row: int
    num_answered: int  # rows of the job, by then


class Refused(msgspec.Struct, frozen=True, tag_field="what", tag="poison-request"):
    """What a convicted row asked for: another row that asks for the same is refused without a search."""

    digest: str


class Climbed(msgspec.Struct, frozen=True, tag_field="what", tag="memory"):
    """A rung of the ladder for a device whose memory ran out."""

    rung: str
    given: dict[str, Any]  # the user's settings; with others the ladder begins anew
    settings: dict[str, Any]  # that take their place
    num_done: int  # rows of the job, by then


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
    """Owned by the process that runs the job; `events` are those of this pass over the input, oldest first."""

    def __init__(self, path: Path | None, *, epoch: int = 1, first_epoch: int = 0, turn: int = 1) -> None:
        """Without a path everything is only remembered."""
        self._path = path
        self._epoch = epoch
        self._turn = turn
        self._encoder = msgspec.json.Encoder()
        self._counter = _Counter()
        self.events: list[Event] = []  # without retries, of which there may be many
        self.num_retries: Counter[int] = Counter()  # by row
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
                pass  # a disk that is full or broken is the journal's to tell

    def forget_done(self, row: int) -> None:
        """Its retries need not be counted any more."""
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
    """Of all passes, for others to see."""
    counter = _Counter()
    for line in read_lines(directory / FAILURE_LOG_NAME):
        if line.epoch >= first_epoch:
            counter.add(line.event)
    return counter.counts


def read_lines(path: Path) -> list[_Line]:
    """Whole ones."""
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
            data = b"\n" + data  # what a crash has torn stays alone in its line
        os.write(descriptor, data)
        if is_synced:
            sync_data(descriptor)
    finally:
        os.close(descriptor)
