"""argparse as all our commands use it: short errors, no abbreviations, and the nearest option for a misspelt one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.errors import nearest


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


class CommandParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown options are reported before missing arguments: the one is often the cause of the other."""
        given = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(given)
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")

    def _refuse_unknown(self, given: Sequence[str]) -> None:
        for argument in given:
            if argument == "--":
                return
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                known = [option for option in self._option_string_actions if option.startswith("--")]
                self.error(f"unknown option {name}{nearest(name, known)}")
