"""Classifies the field names of a line, once for each set of names: most lines of a file have the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.jobs.input.fields import UNSUPPORTED_SAMPLING, sampling_names
from headrace.jobs.input.openai_lines import CHECKED_APART, Endpoint
from headrace.jobs.input.plain_lines import as_members, carried_fields, check_plain, misspelt_fields
from headrace.openai.fields import LABELS

MAX_SETS = 1024


class Names(msgspec.Struct, frozen=True):
    """The names of a plain line."""

    sampling: tuple[str, ...]
    carried: tuple[str, ...] | None  # None: one of them needs another name in the output
    may_be_refused: bool  # the line has a field that is refused with some values
    notes: tuple[str, ...]

    def carried_of(self, line: Mapping[str, Any]) -> bytes:
        if self.carried is None:
            return as_members(carried_fields(line))
        return as_members({name: line[name] for name in self.carried}) if self.carried else b""

    def check(self, line: Mapping[str, Any]) -> None:
        if self.may_be_refused:
            check_plain(line)


class PlainNames:
    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Names] = {}

    def of(self, line: Mapping[str, Any]) -> Names:
        key = tuple(line)
        return self._known.get(key) or self._learn(key)

    def _learn(self, key: tuple[str, ...]) -> Names:
        carried = tuple(carried_fields(dict.fromkeys(key)))
        names = Names(
            sampling=sampling_names(key),
            carried=None if "input" in carried else carried,
            may_be_refused="sampling_params" in key or not UNSUPPORTED_SAMPLING.keys().isdisjoint(key),
            notes=tuple(misspelt_fields(dict.fromkeys(carried))),
        )
        if len(self._known) < MAX_SETS:
            self._known[key] = names
        return names


class BodyNames:
    """Which fields of an OpenAI body are checked together with the sampling parameters: all whose values are checked,
    except those that differ from line to line."""

    def __init__(self) -> None:
        self._known: dict[tuple[Endpoint, tuple[str, ...]], tuple[str, ...]] = {}

    def of(self, body: Mapping[str, Any], endpoint: Endpoint) -> tuple[str, ...]:
        key = (endpoint, tuple(body))
        known = self._known.get(key)
        return self._learn(key) if known is None else known

    def _learn(self, key: tuple[Endpoint, tuple[str, ...]]) -> tuple[str, ...]:
        endpoint, names = key
        checked = tuple(name for name in names if name not in LABELS and name not in CHECKED_APART[endpoint])
        if len(self._known) < MAX_SETS:
            self._known[key] = checked
        return checked
