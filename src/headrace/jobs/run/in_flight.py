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
    answers: Answers | None  # None: until its end there is nothing to tell
    num_sequences: int


class LinesInFlight:
    """Owned by the job's run. The file knows the same rows, from just before they are submitted on."""

    def __init__(self, file: InFlightFile) -> None:
        self._file = file
        self._by_id: dict[str, InFlight] = {}
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, row: int) -> bool:
        return str(row) in self._by_id

    @property
    def ids(self) -> list[str]:
        return list(self._by_id)

    @property
    def rows(self) -> list[int]:
        return [entry.line.reply.index for entry in self._by_id.values()]

    def get(self, request_id: str) -> InFlight | None:
        return self._by_id.get(request_id)

    def announce(self, lines: Iterable[Work]) -> None:
        """They are about to be submitted: if the engine takes the whole process with it, they were there."""
        self._file.add([line.reply.index for line in lines])

    def refused(self, line: Work) -> None:
        """The engine did not take it."""
        self._file.remove(line.reply.index)

    def add(self, entry: InFlight) -> None:
        self._by_id[entry.request.request_id] = entry
        self.num_sequences += entry.num_sequences

    def remove(self, entry: InFlight) -> None:
        """Its result has to be written before others are announced."""
        del self._by_id[entry.request.request_id]
        self.num_sequences -= entry.num_sequences
        self._file.remove(entry.line.reply.index)

    def give_up(self) -> list[Work]:
        """All of them: their engine has died."""
        lines = [entry.line for entry in self._by_id.values()]
        self._by_id.clear()
        self.num_sequences = 0
        self._file.clear()
        return lines

    def close(self) -> None:
        """The run is over, and nothing in flight is to blame for it."""
        self._file.clear()
