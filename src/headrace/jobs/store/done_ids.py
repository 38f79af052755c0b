"""Collects the ids of lines that have results in a journal, so that a repeated id is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.jobs.input.id_filter import IdFilter
from headrace.jobs.input.openai_lines import DUPLICATE_ID, RESULT_START
from headrace.jobs.store.record import Record

BATCH_IDS = 4096


class _Result(msgspec.Struct):
    """The result of an OpenAI line; other fields are not decoded."""

    custom_id: Any = None


class DoneIds:
    """Gets each record while a journal is replayed. `seen` is called once, at the end."""

    def __init__(self, directory: Path | None = None) -> None:
        self._seen = IdFilter(directory=directory)
        self._ids: list[str] = []
        self._numbers: list[int] = []
        self._decode = msgspec.json.Decoder(_Result).decode

    def add(self, record: Record) -> None:
        # A line that was refused for a repeated id does not own the id: the first line does, and may not be done yet.
        if record.error == DUPLICATE_ID or not record.result.startswith(RESULT_START):
            return
        custom_id = self._decode(record.result).custom_id
        if isinstance(custom_id, str) and custom_id:
            self._ids.append(custom_id)
            self._numbers.append(record.index + 1)
            if len(self._ids) >= BATCH_IDS:
                self._pass_on()

    def seen(self) -> IdFilter:
        self._pass_on()
        return self._seen

    def _pass_on(self) -> None:
        if self._ids:
            self._seen.add(self._ids, self._numbers)
            self._ids, self._numbers = [], []
