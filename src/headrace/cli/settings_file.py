"""`--config FILE`: the settings of a TOML file. Flags of other engines in it are explained as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.cli.removed_flags import take_flag
from headrace.engine import settings_file
from headrace.other_settings import flag_of


def read_settings(path: str, owners: tuple[type[Any], ...], print_line: Callable[[str], None]) -> dict[str, Any]:
    """Return the file's values by field name."""
    return settings_file.read_settings(path, owners, lambda name, found: take_flag(flag_of(name), found, print_line))
