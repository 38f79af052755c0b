"""Reads durations ('2h30m') and times ('2026-12-01T06:00') of flags."""

from __future__ import annotations

import re
from datetime import datetime

from headrace.errors import ConfigError

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def read_duration(text: str) -> float:
    """Seconds of '90s', '2h30m', '1d' or of a bare number."""
    try:
        return float(text)
    except ValueError:
        pass
    if not _DURATION.fullmatch(text):
        raise ConfigError(f"{text!r} is not a duration; write it like 90s, 15m, 2h30m or 1d")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def deadline_at(text: str, *, now: float) -> float:
    """Seconds since the Unix epoch: a duration after `now`, or a date and time (local time if it has no zone)."""
    if _DURATION.fullmatch(text):
        return now + read_duration(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"deadline {text!r} is neither a duration, such as 90s, 15m or 2h30m, nor a time, such as 2026-12-01T06:00"
        ) from None
