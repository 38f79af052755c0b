"""A page of /metrics in Prometheus' text format: its samples, and how they grew between two pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Braces may stand in label values, so quoted strings are matched as a whole.
_LINE = re.compile(r'([A-Za-z_:][\w:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)')
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}
_CUMULATIVE = ("_total", "_bucket", "_count", "_sum")

Group = tuple[str, str]  # model and engine


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float

    @property
    def group(self) -> Group:
        """The engine that counted it. Several may be on a page; series of the server as a whole have neither label."""
        labels = self.labels
        return labels.get("model_name", ""), labels.get("engine", labels.get("engine_index", ""))


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page. Lines that are none are skipped; values may be NaN or infinite."""
    for line in text.split("\n"):  # not splitlines(): label values may hold other line separators of Unicode
        found = _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2] or "")}
        yield Sample(found[1], labels, value)


def finite(found: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in found if math.isfinite(sample.value)]


class Growth(NamedTuple):
    samples: list[Sample]  # of counters and histograms, with what was added as the value
    is_restart: bool  # counters of an engine, or of the whole server, began again


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> Growth:
    """What was counted between two pages of finite samples. A series that is new, and all series of an engine whose
    counters fell, began at 0."""
    old = {_key(sample): sample.value for sample in before if sample.name.endswith(_CUMULATIVE)}
    new = [sample for sample in after if sample.name.endswith(_CUMULATIVE)]
    fallen = {sample.group for sample in new if sample.value < old.get(_key(sample), 0.0) and _never_falls(sample)}
    has_new_process = _started_at(before) != _started_at(after)
    grown = [
        sample
        if has_new_process or sample.group in fallen
        else sample._replace(value=max(0.0, sample.value - old.get(_key(sample), 0.0)))
        for sample in new
    ]
    return Growth(grown, has_new_process or bool(fallen))


def _key(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _never_falls(sample: Sample) -> bool:
    return not sample.name.endswith("_sum")  # a histogram of negative values may


def _started_at(page: Iterable[Sample]) -> set[float]:
    return {sample.value for sample in page if sample.name == "process_start_time_seconds"}


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text) if "\\" in text else text
