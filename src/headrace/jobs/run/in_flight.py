"""The lines that the engines have, and which worker has each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from headrace.engine.answers import Answers
from headrace.engine.readouts import PendingPooling
from headrace.jobs.input.prepare import Work
from headrace.jobs.run.parts_in_flight import PartsInFlight
from headrace.jobs.store.in_flight_file import InFlightFile
from headrace.types import Request


class InFlight(msgspec.Struct, eq=False):
    """A request of a line. A line has one, or one for each of its parts."""

    line: Work
    request: Request
    answers: Answers | PendingPooling | None  # None: the request gets a single event, at its end
    num_sequences: int
    parts: PartsInFlight | None = None  # those of its line
    worker: int = 0


class LinesInFlight:
    """Owned by the job's main loop. The file lists the same lines, from just before they are submitted, so that the
    next run knows them if the whole process is lost."""

    def __init__(self, file: InFlightFile) -> None:
        self._file = file
        self._by_id: dict[str, InFlight] = {}
        self._with_parts: dict[int, tuple[Work, int]] = {}  # lines of which some parts may have ended, and where
        self._num_parts = 0  # in `_by_id`
        self._num_sequences: Counter[int] = Counter()  # by worker
        self.num_ended: Counter[int] = Counter()  # lines of this run, by worker

    def __len__(self) -> int:
        """The number of lines."""
        return len(self._by_id) - self._num_parts + len(self._with_parts)

    def __contains__(self, index: int) -> bool:
        return str(index) in self._by_id or index in self._with_parts

    @property
    def requests(self) -> list[InFlight]:
        return list(self._by_id.values())

    def num_sequences(self, worker: int) -> int:
        return self._num_sequences[worker]

    def indices(self, worker: int) -> list[int]:
        """The indices in the input of the lines that the worker has."""
        return [line.reply.index for line in self._lines(worker)]

    def get(self, request_id: str) -> InFlight | None:
        return self._by_id.get(request_id)

    def record(self, lines: Iterable[Work]) -> None:
        """Write the lines to the file. Called before they are submitted."""
        self._file.add([line.reply.index for line in lines])

    def refused(self, line: Work) -> None:
        """The engine did not accept the line."""
        self._file.remove(line.reply.index)

    def add(self, entry: InFlight) -> None:
        self._by_id[entry.request.request_id] = entry
        self._num_sequences[entry.worker] += entry.num_sequences

    def remove(self, entry: InFlight) -> None:
        """The caller writes the line's result before the next `record`."""
        del self._by_id[entry.request.request_id]
        self._num_sequences[entry.worker] -= entry.num_sequences
        self.num_ended[entry.worker] += 1
        self._file.remove(entry.line.reply.index)

    def add_parts(self, entries: list[InFlight]) -> None:
        """The same for all parts of a line."""
        for entry in entries:
            self.add(entry)
            self._with_parts[entry.line.reply.index] = (entry.line, entry.worker)
        self._num_parts += len(entries)

    def end_part(self, entry: InFlight) -> None:
        """A part has ended: its sequences make room for others while the line waits for its other parts."""
        del self._by_id[entry.request.request_id]
        self._num_parts -= 1
        self._num_sequences[entry.worker] -= entry.num_sequences

    def remove_with_parts(self, line: Work) -> None:
        """The same as `remove` for a line whose parts have all ended."""
        _, worker = self._with_parts.pop(line.reply.index)
        self.num_ended[worker] += 1
        self._file.remove(line.reply.index)

    def _lines(self, worker: int) -> list[Work]:
        whole = [entry.line for entry in self._by_id.values() if entry.parts is None and entry.worker == worker]
        return whole + [line for line, owner in self._with_parts.values() if owner == worker]

    def take_all(self, worker: int) -> list[Work]:
        """Remove and return all lines of a worker: its engine has died."""
        lines = self._lines(worker)
        for entry in [entry for entry in self._by_id.values() if entry.worker == worker]:
            del self._by_id[entry.request.request_id]
            self._num_parts -= entry.parts is not None
        for line in lines:
            self._with_parts.pop(line.reply.index, None)
            self._file.remove(line.reply.index)
        del self._num_sequences[worker]
        if not self._by_id and not self._with_parts:
            self._file.clear()
        return lines

    def close(self) -> None:
        """The run ends in a regular way: no line in flight is suspect."""
        self._file.clear()
        self._file.close()
