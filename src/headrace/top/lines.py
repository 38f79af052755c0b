"""Numbers, bars and sparklines as text. What is unknown is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "–"
_STEPS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def clean(text: str, max_len: int = 0) -> str:
    """Text of a server without what would move the cursor or hide other text; cut at `max_len` if that is not 0."""
    shown = "".join(char if char.isprintable() else "�" for char in " ".join(text.split()))
    return shown if not max_len or len(shown) <= max_len else f"{shown[: max_len - 1]}…"


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    shown = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    return f"{shown} {unit}".rstrip()


def percent(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if 0 < value < 0.0005:
        return "<0.1 %"
    return f"{100 * value:.1f} %" if 0 < value < 0.0995 else f"{100 * value:.0f} %"


def duration(seconds: float | None) -> str:
    """Three digits, in the unit that fits."""
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 99.5 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def gibibytes(used: float | None, total: float | None) -> str:
    if used is None:
        return UNKNOWN
    return f"{used / 2**30:,.1f}" + (" GiB" if total is None else f" of {total / 2**30:,.1f} GiB")


def bar(share: float | None, width: int) -> str:
    if share is None:
        return ""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "░")[:width]


def sparkline(values: Sequence[float | None], width: int, highest: float | None = None) -> str:
    """The last `width` values, the newest at the right, with a gap where one is unknown. It stands on 0; its top is
    `highest`, or the highest value shown."""
    shown = values[-width:] if width > 0 else []
    top = highest or max((value for value in shown if value is not None), default=0.0)
    return "".join(_step(value, top) for value in shown).rjust(width)


def _step(value: float | None, top: float) -> str:
    if value is None:
        return " "
    if top <= 0 or value <= 0:
        return _STEPS[0]
    return _STEPS[min(len(_STEPS) - 1, int(value / top * len(_STEPS)))]
