"""The base of all formats of tool calls: reads one answer, text and calls, as it arrives.

The result does not depend on how the text was split into pieces. What turns out not to be a call is text, to the last
character; only white space around calls is dropped. In a stream a call is announced once its name is known and its
arguments have started. If it breaks off later, what was announced stays, and what follows is text. With `whole_calls`
only complete calls are returned.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from headrace.text.answer_parts import ContentDelta, Delta, ToolCallDelta, joined
from headrace.text.tools.calls import Call, ParameterTypes
from headrace.text.tools.json_scanner import Found
from headrace.text.tools.rules import ToolRule

MakeId = Callable[[], str]
Marker = Callable[[str], str]  # writes a marker into a grammar: as text, or as a special token
Tools = Collection[str] | Mapping[str, ParameterTypes]  # their names, or with the types of their parameters


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolParser(ABC):
    """A subclass says where calls start, and what is between them.

    The states are methods: they look at `_unread`, consume what they understand, and return whether to continue; False
    waits for more text.
    """

    name: ClassVar[str]  # vLLM's
    aliases: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[str]  # which write this format, for the documentation
    markers: ClassVar[tuple[str, ...]]  # if these are special tokens, they must not be skipped
    cut_name: ClassVar[re.Pattern[str]]  # finds the name in a forced call: its characters, and what ends it

    def __init__(self, tools: Tools | None, make_id: MakeId, *, whole_calls: bool = False) -> None:
        self._tool_names = None if tools is None else frozenset(tools)
        self._types: Mapping[str, ParameterTypes] = tools if isinstance(tools, Mapping) else {}
        self._make_id = make_id
        self._whole_calls = whole_calls
        self._out: list[Delta] = []
        self._unread = ""
        self._spaces = ""  # white space at the end of the text so far; dropped if a call follows
        self._lead = ""  # what came before a call; text if no call follows
        self._call: Call | None = None
        self._num_sent: int | None = None  # characters of its arguments sent so far; None before it is announced
        self._num_calls = 0
        self._ends_with_call = False
        self._state = self._before

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Tells whether a chat template shows this format."""

    @classmethod
    @abstractmethod
    def rules(cls, tools: Sequence[ToolRule], marker: Marker, max_calls: int) -> list[str]:
        """Returns the Lark rules of an answer that is one to `max_calls` calls, from `start` on."""

    @property
    def num_calls(self) -> int:
        """Calls that were announced so far."""
        return self._num_calls

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        self._read(is_end=False)
        return self._take_out()

    def finish(self) -> list[Delta]:
        self._read(is_end=True)
        self._fail()
        self._write(self._unread)
        self._unread = ""
        if not self._ends_with_call:
            self._flush_spaces()
        return self._take_out()

    def _read(self, *, is_end: bool) -> None:
        while self._unread and self._state(is_end):
            pass

    def _take_out(self) -> list[Delta]:
        """Returns the deltas so far; consecutive pieces of text are joined."""
        deltas, self._out = joined(self._out), []
        return deltas

    # ---- states

    @abstractmethod
    def _before(self, is_end: bool) -> bool:
        """State: no call has started."""

    def _in_call(self, is_end: bool) -> bool:
        call = self._call
        assert call is not None
        for place, char in enumerate(self._unread):
            found = call.feed(char)
            if found is Found.ERROR or not self._may_be_called(call):
                self._unread = self._unread[place + (found is not Found.ERROR) :]
                self._fail()
                return True
            if found is Found.OBJECT_END:
                self._unread = self._unread[place + 1 :]
                self._announce(call)
                self._call, self._lead = None, ""
                self._state = self._after_call
                return True
        self._unread = ""
        if call.can_be_announced and not self._whole_calls:
            self._announce(call)
        return False

    @abstractmethod
    def _after_call(self, is_end: bool) -> bool:
        """State: a call has ended."""

    def _after_failure(self, is_end: bool) -> bool:
        self._state = self._before
        return True

    def _only_text(self, is_end: bool) -> bool:
        """State: no call can follow."""
        self._write(self._unread)
        self._unread = ""
        return False

    # ---- text

    def _write(self, text: str) -> None:
        """Adds text of the answer; white space at its end waits for what follows."""
        body = text.rstrip()
        if body:
            self._flush_spaces()
            self._out.append(ContentDelta(body))
            self._ends_with_call = False
        self._spaces += text[len(body) :]

    def _flush_spaces(self) -> None:
        if self._spaces:
            self._out.append(ContentDelta(self._spaces))
            self._spaces = ""

    def _find(self, markers: Sequence[str], is_end: bool) -> str | None:
        """Returns the marker that comes first. If there is one, consumes it and writes the text before it; a possible
        prefix of one stays."""
        places = {marker: place for marker in markers if (place := self._unread.find(marker)) >= 0}
        found = min(places, key=places.__getitem__) if places else None
        if found is not None:
            before, after = self._unread[: places[found]], self._unread[places[found] + len(found) :]
        else:
            num_kept = 0 if is_end else max(overlap(self._unread, marker) for marker in markers)
            before, after = self._unread[: len(self._unread) - num_kept], self._unread[len(self._unread) - num_kept :]
        self._write(before)
        self._unread = after
        return found

    def _skip(self, num_chars: int) -> None:
        """Moves text into what came before the call."""
        self._lead += self._unread[:num_chars]
        self._unread = self._unread[num_chars:]

    def _skip_spaces(self) -> None:
        self._skip(len(self._unread) - len(self._unread.lstrip()))

    def _drops(self, ends: Sequence[str], is_end: bool) -> bool:
        """Drops what ends a call, which models sometimes omit, and white space before it. Tells whether it is clear
        whether it is there."""
        rest = self._unread.lstrip()
        for end in ends:
            if rest.startswith(end):
                self._unread = rest[len(end) :]
                return True
            if not is_end and end.startswith(rest):
                return False
        return True

    # ---- calls

    def _begin(self, call: Call) -> None:
        self._call = call
        self._num_sent = None
        self._state = self._in_call

    def _may_be_called(self, call: Call) -> bool:
        return call.name is None or self._tool_names is None or call.name in self._tool_names

    def _announce(self, call: Call) -> None:
        """Emits what is known of a call and was not emitted before."""
        assert call.name is not None
        if self._num_sent is None:
            self._num_sent = 0
            self._spaces = ""
            self._ends_with_call = True
            self._out.append(ToolCallDelta(self._num_calls, call.id or self._make_id(), call.name))
            self._num_calls += 1
        if more := call.arguments[self._num_sent :]:
            self._num_sent += len(more)
            self._out.append(ToolCallDelta(self._num_calls - 1, arguments=more))

    def _fail(self) -> None:
        """Turns what was taken for a call into text. What was announced stays, and so does what would have been
        announced if the text had come in shorter pieces."""
        call, self._call = self._call, None
        lead, self._lead = self._lead, ""
        self._state = self._after_failure
        if call is None:
            self._write(lead)
        elif call.can_be_announced and self._may_be_called(call) and not self._whole_calls:
            self._announce(call)
            self._write(call.text_after_arguments)
        else:
            self._write(lead + call.text)


def overlap(text: str, marker: str) -> int:
    """Returns how much of the end of the text may be the start of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
