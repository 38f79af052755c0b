"""Numbers of records as text. What is missing is "not available", never 0."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NOT_AVAILABLE = "not available"
BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def number(value: Any, unit: str = "") -> str:
    """Three or four significant digits, with thousands separated."""
    if not is_number(value):
        return NOT_AVAILABLE
    if isinstance(value, int) or abs(value) >= 1000:
        shown = f"{value:,.0f}"
    elif abs(value) >= 100:
        shown = f"{value:.0f}"
    elif abs(value) >= 10:
        shown = f"{value:.1f}"
    elif abs(value) >= 1:
        shown = f"{value:.2f}"
    else:
        shown = f"{value:.3g}"
    return f"{shown} {unit}" if unit else shown


def percent(value: Any, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %" if is_number(value) else NOT_AVAILABLE


def milliseconds(value: Any) -> str:
    return number(float(value), "ms") if is_number(value) else NOT_AVAILABLE


def seconds(value: Any) -> str:
    if not is_number(value):
        return NOT_AVAILABLE
    if value < 120:
        return number(float(value), "s")
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def memory(value: Any) -> str:
    if not is_number(value):
        return NOT_AVAILABLE
    power = min(len(BYTE_UNITS) - 1, int(math.log(max(1.0, abs(value)), 1024)))
    return f"{value / 1024**power:.{1 if power else 0}f} {BYTE_UNITS[power]}"


def interval(low: Any, high: Any) -> str:
    return f"{number(low)} to {number(high)}" if is_number(low) and is_number(high) else NOT_AVAILABLE


def ratio(value: Any) -> str:
    return f"{value:.3f}" if is_number(value) else NOT_AVAILABLE


def times(value: Any) -> str:
    """How many times as much."""
    return f"{value:.2f}x" if is_number(value) else NOT_AVAILABLE


def plain(value: Any) -> str:
    """Any value of a record as text, such as a setting: true, 0 and "auto" differ from each other."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(each)}" for key, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value)) or "none"
    return str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def found(record: Any, *path: str) -> Any:
    """The value under these keys, or None if one of them is missing."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


UNITS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_ms", milliseconds),
    ("_bytes", memory),
    ("_share", percent),
    ("_utilization", percent),
    ("_s", seconds),
    ("_seconds", seconds),
)


def of_kind(value: Any, name: str) -> str:
    """A counter or a fact with the unit that its name ends in."""
    if name.endswith("_shares") and isinstance(value, Sequence):
        return ", ".join(map(percent, value)) or NOT_AVAILABLE
    if not is_number(value):
        return NOT_AVAILABLE if value is None else plain(value)
    for word in reversed(name.split()):  # `loop_lag_ms p99` is in ms, `processes peak_rss_bytes` in bytes
        for suffix, shown in UNITS:
            if f"_{word}".endswith(suffix) and not word.endswith("_per_s"):
                return shown(value)
    return number(value)


def label_of(name: str) -> str:
    """The name of a fact for people; units that the value shows are left out."""
    short = re.sub(r"(?<!_per)_(bytes|shares?|ms|s)(?= |$)", "", name.removeprefix("num_"))
    return re.sub(r" w$", " (W)", short.replace("_per_s", "/s").replace("_", " "))


def flat(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, each with the names that lead to it. Long lists are counted."""
    if not isinstance(facts, Mapping):
        return
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name} ")
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 8:
            yield name, f"{len(value):,} values"
        else:
            yield name, value
