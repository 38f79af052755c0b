"""Applies the table of `other_flags/`: settings of other engines that Headrace does not have.

One table for all fronts: flags of `serve` and `run`, keyword arguments of `LLM` and `AsyncEngine`, and settings files.
A neutral value, one that asks for what Headrace does anyway, is accepted silently. A setting that would not change any
answer is ignored with one line. One that would is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from headrace.errors import ConfigError
from headrace.flag_groups import OFF, OtherFlag
from headrace.other_flags import OF_THE_SERVER, OTHER_FLAGS

ALIASES = {  # vLLM's names for settings that Headrace has
    "data_parallel_size": ("-dp",),
    "gpu_memory_utilization": ("--device-memory-utilization",),
    "shutdown_timeout_s": ("--shutdown-timeout",),
    "sse_keep_alive_interval_s": ("--sse-keep-alive-interval",),
    "kv_cache_memory_bytes": ("--kv-cache-memory",),
    "request_timeout_s": ("--request-timeout",),
    "speculative_config": ("-sc",),
    "speculative_model": ("--spec-model",),
    "num_speculative_tokens": ("--spec-tokens", "--num-speculative-decoder-samples"),
}


VALUES = {  # vLLM's values of settings that Headrace has
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"dummy": "random"},
    "distributed_executor_backend": {"uni": "mp"},
    "attention_backend": {"flash_attn": "FLASH_ATTN", "triton_attn": "TRITON_ATTN"},
}
READABLE_NUMBERS = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")  # those of vLLM that take 32k
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """A setting of another engine, as it was given to one of the fronts."""

    other: OtherFlag
    value: object

    @property
    def is_neutral(self) -> bool:
        return self.other.is_neutral(self.value)


def find_other(name: str, value: object = "") -> OtherSetting | None:
    """The row of a flag or of a keyword argument; None if no other engine has it. Switches may be negated: by a name
    that starts with `no`, or by the value False."""
    flag = flag_of(name)
    negated = "--no-" + flag.removeprefix("--")
    if str(value).lower() == OFF and negated in OTHER_FLAGS:
        return OtherSetting(OTHER_FLAGS[negated], True)
    other = OTHER_FLAGS.get(flag) or OF_THE_SERVER.get(flag)
    if other is not None:
        return OtherSetting(other, value)
    switch = OTHER_FLAGS.get("--" + flag.removeprefix("--no-"))
    return None if switch is None or switch.takes_value else OtherSetting(switch, OFF)


def flag_of(name: str) -> str:
    """The flag of a name in one of vLLM's forms: with underscores, with a key of its JSON (`--compilation-config.mode`)
    or with a level (`-O3`). Short flags are as given: `-tp`."""
    name = name.partition(".")[0]
    if name.startswith("-O"):
        return "-O"
    is_short = name.startswith("-") and not name.startswith("--")
    return name if is_short else "--" + name.removeprefix("--").replace("_", "-")


def field_of_alias(name: str) -> str | None:
    """The setting that vLLM calls `name`."""
    return next((field for field, flags in ALIASES.items() if flag_of(name) in flags), None)


def own_value(name: str, value: Any) -> Any:
    """A value in one of vLLM's forms (`half`, `dummy`, `32k`) as Headrace's. Others are as given. Raises a ConfigError
    for a number that cannot be read."""
    if isinstance(value, str) and name in READABLE_NUMBERS:
        return read_number(name, value)
    if name == "max_model_len" and value == -1 and not isinstance(value, bool):
        return None
    return VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def read_number(name: str, text: str) -> int | None:
    """The suffixes k, m, g and t are decimal, K, M, G and T binary, as in vLLM. `auto` and -1 mean the longest context
    that fits, which is the default."""
    if name == "max_model_len" and text.strip().lower() in ("auto", "-1"):
        return None
    found = re.fullmatch(r"(\d+)(\.\d+)?([kmgtKMGT]?)", text.strip())
    if found is None:
        raise ConfigError(f"{name} must be a whole number, such as 4096, 4k (4,000) or 4K (4,096), got {text!r}")
    whole, fraction, suffix = found[1], found[2], found[3]
    if fraction is None:
        return int(whole) * (_SUFFIXES[suffix] if suffix else 1)
    number = Decimal(whole + fraction) * _SUFFIXES[suffix] if suffix.islower() else None
    if number is None or number != int(number):
        raise ConfigError(
            f"{name} must be a whole number, got {text!r}; only k, m, g and t take decimals, such as 1.5m (1,500,000)"
        )
    return int(number)


def without_other_settings(
    settings: Mapping[str, Any], known: Collection[str], note: Callable[[str], None]
) -> dict[str, Any]:
    """Keyword arguments without those of other engines. `note` gets one line for each that is ignored and not neutral;
    one that is refused raises a ConfigError. Names that nobody knows are kept."""
    kept = {}
    for given, value in settings.items():
        name = given if given in known else field_of_alias(given) or given
        if name not in known and (found := find_other(name, value)) is not None:
            take_argument(name, found, note)
        elif name in kept or (name != given and name in settings):
            raise ConfigError(f"{name} is given twice: {given} is another name for it")
        else:
            kept[name] = own_value(name, value)
    return kept


def take_argument(name: str, found: OtherSetting, note: Callable[[str], None]) -> None:
    """Notes or refuses an argument of `LLM` or a key of its file, with the names that Python programs use."""
    if found.is_neutral:
        return
    other = replace(found.other, answer=as_arguments(found.other.answer))
    message = other.message(f"{name}={found.value!r}") + accepted(other)
    if other.outcome == "refused":
        raise ConfigError(message)
    note(message)


def accepted(other: OtherFlag) -> str:
    """The neutral values, for a message that refuses another one."""
    if not other.neutral or not other.takes_value or other.outcome != "refused":
        return ""
    return f" (only {' or '.join(other.neutral)} is accepted)"


def explanation(name: str) -> str | None:
    """Why there is no keyword argument of this name in Python; None if the name is not known."""
    flag = flag_of(name)
    other = OTHER_FLAGS.get(flag) or OF_THE_SERVER.get(flag)
    return None if other is None else as_arguments(other.answer)


def as_arguments(text: str) -> str:
    """Flags in `text` as keyword arguments."""
    return re.sub(r"--(no-)?([a-z0-9-]+)", _argument, text)


def _argument(flag: re.Match[str]) -> str:
    return flag[2].replace("-", "_") + ("=False" if flag[1] else "")
