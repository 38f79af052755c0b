"""The lines that the engine has."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.engine.answers import Answers
from headrace.jobs.input.prepare import Work
from headrace.jobs.store.in_flight_file import InFlightFile
from headrace.types import Request


class InFlight(msgspec.Struct, eq=False):
    line: Work
    request: Request
    answers: Answers | None  # None: the request gets a single event, at its end
    num_sequences: int


class LinesInFlight:
    """Owned by the job's main loop. The file lists the same lines, from just before they are submitted, so that the
    next run knows them if the whole process is lost."""

    def __init__(self, file: InFlightFile) -> None:
        self._file = file
        self._by_id: dict[str, InFlight] = {}
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, index: int) -> bool:
        return str(index) in self._by_id

    @property
    def ids(self) -> list[str]:
        return list(self._by_id)

    @property
    def indices(self) -> list[int]:
        """The indices of the lines in the input."""
        return [entry.line.reply.index for entry in self._by_id.values()]

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
        self.num_sequences += entry.num_sequences

    def remove(self, entry: InFlight) -> None:
        """The caller writes the line's result before the next `record`."""
        del self._by_id[entry.request.request_id]
        self.num_sequences -= entry.num_sequences
        self._file.remove(entry.line.reply.index)

    def take_all(self) -> list[Work]:
        """Remove and return all lines: their engine has died."""
        lines = [entry.line for entry in self._by_id.values()]
        self._by_id.clear()
        self.num_sequences = 0
        self._file.clear()
        return lines

    def close(self) -> None:
        """The run ends in a regular way: no line in flight is suspect."""
        self._file.clear()
        self._file.close()
