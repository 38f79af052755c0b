"""The thread that reads and prepares lines ahead of the engine, up to a fixed number of batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import JobError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.job_checks import JobChecks
from headrace.jobs.input.prepare import Items

MAX_BATCHES_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    items: Items


@dataclass(frozen=True, slots=True)
class InputEnded:
    num_lines: int


@dataclass(frozen=True, slots=True)
class InputFailed:
    error: BaseException


class Preparer(Protocol):
    num_ahead: int  # batches that it takes before it returns the first

    def prepare_all(self, batches: Iterable[list[InputLine]]) -> Iterator[Items]:
        """A list of items for each batch, in order."""
        ...


Send = Callable[[Prepared | InputEnded | InputFailed], None]


class Feed:
    """Sends each batch as soon as it is prepared. Pauses while the maximum number of batches is unused."""

    def __init__(
        self, batches: Iterable[list[InputLine]], preparer: Preparer, send: Send, *, checks: JobChecks
    ) -> None:
        self._batches = batches
        self._preparer = preparer
        self._checks = checks
        self._send = send
        self._slots = threading.Semaphore(MAX_BATCHES_AHEAD + preparer.num_ahead)
        self._is_stopped = False
        self._read_error: JobError | None = None
        # A daemon: it may be blocked on a pipe that never ends.
        self._thread = threading.Thread(target=self._run, name="headrace-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take_more(self) -> None:
        """A batch was used: one more may be prepared."""
        self._slots.release()

    def stop(self) -> None:
        self._is_stopped = True
        self._slots.release()

    def _run(self) -> None:
        try:
            num_lines = self._send_all()
        except BaseException as error:  # noqa: BLE001 - the job must learn why its input ended
            self._send(InputFailed(error))
        else:
            self._send(InputEnded(num_lines))

    def _send_all(self) -> int:
        num_lines = 0
        for items in self._preparer.prepare_all(self._batches_until_stopped()):
            self._send(Prepared(self._checks.check(items)))
            num_lines += len(items)
        if self._read_error is not None:
            raise self._read_error
        return num_lines

    def _batches_until_stopped(self) -> Iterator[list[InputLine]]:
        """Ends where the input cannot be read any further: the batches before that are still being prepared."""
        try:
            for batch in self._batches:
                self._slots.acquire()
                if self._is_stopped:
                    return
                yield batch
        except JobError as error:
            self._read_error = error
