"""What `resolve` tells the user: each decided value with its reason, and warnings."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.settings import Choice

Note = Callable[[str, object, str], None]  # a setting, its value, and the reason
Warn = Callable[[str], None]


class Choices:
    """Collects them in the order in which they were decided. Owned by a `Resolver`."""

    def __init__(self) -> None:
        self.noted: list[Choice] = []
        self.warnings: list[str] = []

    def note(self, name: str, value: object, reason: str) -> None:
        self.noted.append(Choice(name, f"{value:,}" if isinstance(value, int) else str(value), reason))

    def warn(self, text: str) -> None:
        self.warnings.append(text)
