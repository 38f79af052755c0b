"""argparse for all commands: short errors, no abbreviations, a suggestion for a misspelt option."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.errors import nearest


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """The command line with `--max_num_seqs` as `--max-num-seqs`. What follows `--`, `=` or a dot is as given."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return [_with_dashes(argument) for argument in arguments[:end]] + list(arguments[end:])


def _with_dashes(argument: str) -> str:
    name = re.match(r"--[^.=\s]*", argument)
    return argument if name is None else name[0].replace("_", "-") + argument[name.end() :]


class CommandParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and report unknown options before missing arguments: they are often the cause."""
        given = self._with_plain_switches(with_dashes(sys.argv[1:] if args is None else list(args)))
        self._refuse_unknown(given)
        return super().parse_known_args(given, namespace)

    def _with_plain_switches(self, given: Sequence[str]) -> list[str]:
        """The command line with `--switch False` and `--switch=False` as `--no-switch`, as some vLLM guides write."""
        kept: list[str] = []
        for argument in given:
            flag, has_value, value = argument.partition("=")
            if not has_value and kept and argument.lower() in ("true", "false"):
                flag, value = kept[-1], argument
            action = self._option_string_actions.get(flag)
            if not isinstance(action, argparse.BooleanOptionalAction) or value.lower() not in ("true", "false"):
                kept.append(argument)
                continue
            if not has_value:
                kept.pop()
            is_on = (value.lower() == "true") != flag.startswith("--no-")
            kept.append(next(name for name in action.option_strings if name.startswith("--no-") != is_on))
        return kept

    @property
    def actions(self) -> dict[str, argparse.Action]:
        """What each flag does."""
        return self._option_string_actions

    @property
    def flags(self) -> list[str]:
        """All flags, long and short."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _refuse_unknown(self, given: Sequence[str]) -> None:
        for argument in given:
            if argument == "--":
                return
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in self.flags:
                known = [flag for flag in self.flags if flag.startswith("--")]
                self.error(f"unknown option {name}{nearest(name, known)}")
