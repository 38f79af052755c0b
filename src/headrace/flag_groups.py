"""A flag of another engine that Headrace does not have, and groups of such flags with the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ignored", "refused"]
OFF = "false"  # the neutral value of most switches
_EMPTY = ("{}", "[]", "()", "set()")  # configs and lists that set nothing


@dataclass(frozen=True, slots=True)
class OtherFlag:
    outcome: Outcome
    answer: str  # what replaced it, or why it is not needed
    takes_value: bool = True
    neutral: tuple[str, ...] = ()  # values that match what Headrace does anyway, in lower case
    takes_list: bool = False  # all words up to the next flag

    def message(self, name: str) -> str:
        return f"{name} is {self.outcome}: {self.answer}"

    def is_neutral(self, value: object) -> bool:
        """None is what Python programs pass for "not set"."""
        return value is None or str(value).lower() in self.neutral or (self.takes_value and str(value) in _EMPTY)


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags with the same answer. Names are without dashes, short ones with theirs; after `=`, the neutral values,
    separated by `|`. `lists` take several words, `values` one, `switches` none."""

    outcome: Outcome
    answer: str
    values: str = ""
    switches: str = ""
    lists: str = ""

    def flags(self) -> dict[str, OtherFlag]:
        kinds = ((self.values, True, False), (self.switches, False, False), (self.lists, True, True))
        return {
            flag: OtherFlag(self.outcome, self.answer, takes_value, neutral, takes_list)
            for names, takes_value, takes_list in kinds
            for flag, neutral in (_entry(word, is_switch=not takes_value) for word in names.split())
        }


def _entry(word: str, *, is_switch: bool) -> tuple[str, tuple[str, ...]]:
    name, has_neutral, neutral = word.partition("=")
    flag = name if name.startswith("-") else f"--{name}"
    if has_neutral:
        return flag, tuple(neutral.split("|"))
    return flag, (OFF,) if is_switch else ()
