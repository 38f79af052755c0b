"""What the names of a line's fields say, found out once for each set of names: most lines of a file have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.jobs.input.fields import UNSUPPORTED, UNSUPPORTED_SAMPLING, sampling_names
from headrace.jobs.input.openai_lines import KNOWN_FIELDS, Endpoint, check_body
from headrace.jobs.input.plain_lines import as_members, carried_fields, check_plain, misspelt_fields

MAX_SETS = 1024


class Names(msgspec.Struct, frozen=True):
    """Of a plain line."""

    sampling: tuple[str, ...]
    carried: tuple[str, ...] | None  # None: one of them needs another name
    is_suspect: bool  # a value may have to be refused
    notes: tuple[str, ...]

    def carried_of(self, line: Mapping[str, Any]) -> bytes:
        if self.carried is None:
            return as_members(carried_fields(line))
        return as_members({name: line[name] for name in self.carried}) if self.carried else b""

    def check(self, line: Mapping[str, Any]) -> None:
        if self.is_suspect:
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
            is_suspect="sampling_params" in key or not UNSUPPORTED_SAMPLING.keys().isdisjoint(key),
            notes=tuple(misspelt_fields(dict.fromkeys(carried))),
        )
        if len(self._known) < MAX_SETS:
            self._known[key] = names
        return names


class BodyFields(msgspec.Struct, frozen=True):
    """Of an OpenAI body."""

    endpoint: Endpoint
    sampling: tuple[str, ...]
    is_suspect: bool

    def check(self, body: Mapping[str, Any]) -> None:
        if self.is_suspect:
            check_body(body, self.endpoint)


class BodyNames:
    def __init__(self) -> None:
        self._known: dict[tuple[Endpoint, tuple[str, ...]], BodyFields] = {}

    def of(self, body: Mapping[str, Any], endpoint: Endpoint) -> BodyFields:
        key = (endpoint, tuple(body))
        return self._known.get(key) or self._learn(key)

    def _learn(self, key: tuple[Endpoint, tuple[str, ...]]) -> BodyFields:
        endpoint, names = key
        is_suspect = "cache_salt" in names or not UNSUPPORTED.keys().isdisjoint(names)
        fields = BodyFields(endpoint, sampling_names(names), is_suspect or not KNOWN_FIELDS[endpoint].issuperset(names))
        if len(self._known) < MAX_SETS:
            self._known[key] = fields
        return fields
