"""Removes the flags of other engines from a command line, and explains each: `headrace/other_settings.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from headrace.errors import ConfigError
from headrace.other_settings import OTHER_FLAGS, OtherFlag, OtherSetting, accepted, find_other


def without_other_flags(
    arguments: Sequence[str], print_line: Callable[[str], None], flags: Collection[str]
) -> list[str]:
    """Remove the flags of other engines, with one line for each. A refused one raises a ConfigError.

    `flags`: those of the command. An answer may name flags that only `headrace serve` has.
    """
    kept: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, has_value, value = argument.partition("=")
        found = find_other(flag) if flag.startswith("-") and flag not in flags else None
        if found is None:
            kept.append(argument)
            continue
        if not has_value and remaining and _is_value(remaining[0], found.other):
            value = remaining.pop(0)
        if not value and not found.other.takes_value:
            value = "true"
        take_flag(flag, find_other(flag, value) or found, print_line, flags)
    return kept


def _is_value(argument: str, other: OtherFlag) -> bool:
    """Switches may have true or false, as some vLLM guides write."""
    return not argument.startswith("--") if other.takes_value else argument.lower() in ("true", "false")


def take_flag(
    flag: str, found: OtherSetting, print_line: Callable[[str], None], flags: Collection[str] | None = None
) -> None:
    other = found.other
    if found.is_neutral:
        return
    if other.outcome == "refused":
        raise ConfigError(other.message(flag) + accepted(other) + _elsewhere(other, flags))
    print_line(other.message(flag) + _elsewhere(other, flags))


def _elsewhere(other: OtherFlag, flags: Collection[str] | None) -> str:
    named = [] if flags is None else [flag for flag in re.findall(r"--[a-z0-9-]+", other.answer) if flag not in flags]
    return f" ({' and '.join(named)}: only in 'headrace serve')" if named else ""


def table() -> str:
    """Generate the Markdown table of docs/serving-operations.md."""
    head = "| flag | here | |\n| --- | --- | --- |\n"
    return head + "".join(
        f"| `{flag}` | {other.outcome} | {other.answer}{_accepted(other)} |\n" for flag, other in OTHER_FLAGS.items()
    )


def _accepted(other: OtherFlag) -> str:
    return f" ({' or '.join(other.neutral)} is accepted)" if other.neutral and other.takes_value else ""
