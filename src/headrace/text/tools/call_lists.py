"""Calls in square brackets, separated by commas: what lists of JSON objects and of Python calls have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from headrace.text.tools.parser import ToolParser


class CallListParser(ToolParser, ABC):
    """A subclass says where a list starts (`_before`) and how a call in it starts (`_at_call`)."""

    ends: ClassVar[tuple[str, ...]] = ()  # what may follow a list
    only_at_start: ClassVar[bool] = False  # of the answer; a later list is text

    @abstractmethod
    def _at_call(self, is_end: bool) -> bool:
        """State: a call must start."""

    def _at_list(self, is_end: bool) -> bool:
        self._skip_spaces()
        if self._unread.startswith("["):
            self._skip(1)
            self._state = self._at_call
        elif self._unread:
            self._fail()
        return True

    def _after_call(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._skip(len(self._unread) - len(rest) + 1)
            self._state = self._at_call
            return True
        if rest[0] == "]":
            self._unread = rest[1:]
            self._state = self._after_list
        else:
            self._state = self._after_failure
        return True

    def _after_list(self, is_end: bool) -> bool:
        if self.ends and not self._drops(self.ends, is_end):
            return False
        self._state = self._after_failure
        return True

    def _after_failure(self, is_end: bool) -> bool:
        """State: a list has ended, or what began like one was none."""
        self._state = self._only_text if self.only_at_start else self._before
        return True
