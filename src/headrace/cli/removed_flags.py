"""Removes the flags of other engines from a command line, and explains each: `headrace/other_flags/`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from headrace.cli.engine_flags import json_flags, list_flags
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError
from headrace.flag_groups import FlagGroup, OtherFlag
from headrace.other_flags import GROUPS, OTHER_FLAGS
from headrace.other_settings import OtherSetting, accepted, find_other, flag_of


def without_other_flags(
    arguments: Sequence[str], print_line: Callable[[str], None], parser: CommandParser
) -> list[str]:
    """Remove the flags of other engines, with one line for each. A refused one raises a ConfigError.

    Dotted flags of the command itself (`--default-chat-template-kwargs.enable_thinking false`) become JSON.
    """
    kept: list[str] = []
    explained: set[str] = set()  # dotted flags with the same parent are explained once
    objects = json_flags(parser)
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            return [*kept, argument, *remaining]
        written, has_value, value = argument.partition("=")
        flag = flag_of(written) if written.startswith("-") else ""
        if flag in objects and "." in written:
            kept += [flag, _as_json(written, value if has_value or not remaining else remaining.pop(0))]
            continue
        found = None if not flag or flag in parser.flags else find_other(written)
        if found is None:
            kept.append(argument)
            continue
        if not has_value:
            value = _take_value(written, found.other, remaining)
        if "." not in written or flag not in explained:
            take_flag(written, find_other(written, value) or found, print_line, parser.flags)
        explained.add(flag)
    return kept


def _as_json(written: str, value: str) -> str:
    """The object that a dotted flag sets one key of."""
    try:
        given: Any = json.loads(value)
    except ValueError:
        given = value
    for key in reversed(written.split(".")[1:]):
        given = {key: given}
    return json.dumps(given)


def _take_value(written: str, other: OtherFlag, remaining: list[str]) -> str:
    """The value of a flag, removed from the words that follow it."""
    if written.startswith("-O") and len(written) > 2 and "." not in written:
        return written[2:]
    if other.takes_list and "." not in written:
        words = _words(remaining)
        del remaining[: len(words)]
        return " ".join(words)
    if remaining and _is_value(remaining[0], other):
        return remaining.pop(0)
    return "" if other.takes_value else "true"


def _words(arguments: Sequence[str]) -> list[str]:
    """The words up to the next flag."""
    end = next((place for place, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return list(arguments[:end])


def _is_value(argument: str, other: OtherFlag) -> bool:
    """Switches may have true or false, as some vLLM guides write."""
    return not argument.startswith("--") if other.takes_value else argument.lower() in ("true", "false")


def flag_with_words(arguments: Sequence[str], parser: CommandParser) -> str | None:
    """The first flag that took several words, of which the last may have been meant for something else."""
    lists = list_flags(parser) | {flag for flag, other in OTHER_FLAGS.items() if other.takes_list}
    for place, argument in enumerate(arguments):
        if argument.startswith("-") and flag_of(argument) in lists and len(_words(arguments[place + 1 :])) > 1:
            return argument
    return None


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
    head = "| flags of others | here | |\n| --- | --- | --- |\n"
    return head + "".join(f"| {_names(group)} | {group.outcome} | {group.answer} |\n" for group in GROUPS)


def _names(group: FlagGroup) -> str:
    return ", ".join(f"`{flag}`{_accepted(other)}" for flag, other in group.flags().items())


def _accepted(other: OtherFlag) -> str:
    return f" ({' or '.join(other.neutral)})" if other.neutral and other.takes_value else ""
