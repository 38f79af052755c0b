"""Removes the flags of other engines from a command line, and explains each: `headrace/other_settings.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from headrace.errors import ConfigError
from headrace.other_settings import OTHER_FLAGS, OtherFlag

ALIASES = {  # vLLM's names for settings that Headrace has
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "sse_keep_alive_interval_s": ("--sse-keep-alive-interval",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "request_timeout_s": ("--request-timeout",),
}


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
        other = OTHER_FLAGS.get(flag.replace("_", "-") if flag.startswith("--") else flag)
        if other is None or flag in flags:
            kept.append(argument)
            continue
        if other.takes_value and not has_value and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        check_flag(flag, other, value, print_line, flags)
    return kept


def check_flag(
    flag: str, other: OtherFlag, value: str, print_line: Callable[[str], None], flags: Collection[str] | None = None
) -> None:
    if value and value in other.neutral:
        return
    if other.outcome == "refused":
        exception = f" (only {' or '.join(other.neutral)} is accepted)" if other.neutral else ""
        raise ConfigError(other.message(flag) + exception + _elsewhere(other, flags))
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
    return f" ({' or '.join(other.neutral)} is accepted)" if other.neutral else ""
