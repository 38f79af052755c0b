"""Finds stop strings in text that arrives in pieces.

Text is held back only while it may still become a stop string. The stop string that ends first wins, and of those that
end together the longest. So the result does not depend on how the text was split.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The search in one answer. After a match all further text is dropped."""

    __slots__ = ("_held", "_include_stop", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that may be shown now, and the stop string once one is complete."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        text = self._held + text
        if found := self._find(text):
            end, self.matched = found
            self._held = ""
            return text[: end if self._include_stop else end - len(self.matched)], self.matched
        end = len(text) - self._num_held(text)
        self._held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Returns where the winning stop string ends, and which it is."""
        found = [stop for stop in self._stops if stop in text]
        if not found:
            return None
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in found]
        end, _, stop = min(ends)
        return end, stop

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest suffix of the text that is a prefix of a stop string."""
        return max([_overlap(text, stop) for stop in self._stops])


def _overlap(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
