"""Tool calls in a model's answer: separated from its text as it arrives, in the deltas of OpenAI's streams.

    hermes         <tool_call>{"name": ..., "arguments": {...}}</tool_call>            Hermes, Qwen and others
    llama3_json    {"name": ..., "parameters": {...}}; ...  optionally after <|python_tag|>; only at the start
    mistral        [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...}

The result does not depend on how the text was split into pieces. What turns out not to be a call is text, to the last
character; only white space around calls is dropped. In a stream a call is announced once its name is known and its
arguments have started. If it breaks off later, what was announced stays, and what follows is text. `parse` sees the
whole answer, and returns only complete calls.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from headrace.errors import ConfigError, RequestError, nearest
from headrace.text.json_scanner import Found
from headrace.text.tool_call_json import Call, NamedCall, ObjectCall

MakeId = Callable[[], str]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The start of a call, with its id and name, or more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # JSON text


Delta = ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    content: str
    tool_calls: tuple[ToolCall, ...]


def parser_for(
    name_or_template: str | None,
    tool_names: Collection[str] | None = None,
    make_id: MakeId | None = None,
    *,
    whole_calls: bool = False,
) -> ToolParser:
    """Returns the parser with this name, or the one whose format a chat template shows; Hermes if it shows none.

    `tool_names`: calls of other tools are text. `whole_calls`: a call is announced when it is complete.
    """
    parser = PARSERS[_name_of(name_or_template)]
    return parser(tool_names, make_id or new_call_id, whole_calls=whole_calls)


def check_parser_name(name: str) -> None:
    """Refuses the setting `tool_call_parser` if no parser has this name."""
    known = sorted({*PARSERS, *_ALIASES})
    if name not in known:
        valid = ", ".join(["auto", *known])
        raise ConfigError(f"tool_call_parser {name!r} is unknown{nearest(name, known)}; use one of {valid}")


def parse(text: str, name_or_template: str | None, tool_names: Collection[str] | None = None) -> ParsedAnswer:
    """Parses a whole answer at once."""
    parser = parser_for(name_or_template, tool_names, whole_calls=True)
    return put_together([*parser.push(text), *parser.finish()])


def put_together(deltas: list[Delta]) -> ParsedAnswer:
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            calls.setdefault(delta.index, []).append(delta)
    return ParsedAnswer(
        content,
        tuple(
            ToolCall(parts[0].id or "", parts[0].name or "", "".join(part.arguments for part in parts))
            for parts in calls.values()
        ),
    )


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _name_of(name_or_template: str | None) -> str:
    given = name_or_template or ""
    if given in PARSERS:
        return given
    if given in _ALIASES:
        return _ALIASES[given]
    if given and "{" not in given:  # a template contains braces
        raise RequestError(
            f"unknown tool parser {given!r}{nearest(given, PARSERS)}; known are {', '.join(PARSERS)}", param="tools"
        )
    for parser in (HermesParser, MistralParser, LlamaParser):
        if any(marker in given for marker in parser.markers):
            return parser.name
    return LlamaParser.name if "<|start_header_id|>" in given and "tools" in given else HermesParser.name


class ToolParser(ABC):
    """Reads one answer, text and calls, as it arrives. A subclass says where calls start, and what is between them.

    The states are methods: they look at `_unread`, consume what they understand, and return whether to continue; False
    waits for more text.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # if these are special tokens, they must not be skipped

    def __init__(self, tool_names: Collection[str] | None, make_id: MakeId, *, whole_calls: bool = False) -> None:
        self._tool_names = None if tool_names is None else frozenset(tool_names)
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
        merged: list[Delta] = []
        for delta in self._out:
            last = merged[-1] if merged else None
            if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
                merged[-1] = ContentDelta(last.text + delta.text)
            else:
                merged.append(delta)
        self._out = []
        return merged

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

    def _finds(self, marker: str, is_end: bool) -> bool:
        """Tells whether the marker is there. If so, consumes it and writes the text before it; a possible prefix of
        it stays."""
        before, found, after = self._unread.partition(marker)
        if not found:
            num_kept = 0 if is_end else _overlap(self._unread, marker)
            before, after = self._unread[: len(self._unread) - num_kept], self._unread[len(self._unread) - num_kept :]
        self._write(before)
        self._unread = after
        return bool(found)

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


def _overlap(text: str, marker: str) -> int:
    """Returns how much of the end of the text may be the start of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class HermesParser(ToolParser):
    name = "hermes"
    markers = ("<tool_call>",)

    def _before(self, is_end: bool) -> bool:
        (marker,) = self.markers
        if not self._finds(marker, is_end):
            return False
        self._lead = marker
        self._begin(ObjectCall())
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Consumes white space and the end tag, which models sometimes omit."""
        rest = self._unread.lstrip()
        if not is_end and len(rest) < len(_HERMES_END) and _HERMES_END.startswith(rest):
            return False
        if rest.startswith(_HERMES_END):
            self._unread = rest[len(_HERMES_END) :]
        self._state = self._before
        return True


_HERMES_END = "</tool_call>"


class LlamaParser(ToolParser):
    """Llama's calls have no marker, so they are recognized only at the start of the answer."""

    name = "llama3_json"
    markers = ("<|python_tag|>",)

    def _before(self, is_end: bool) -> bool:
        (marker,) = self.markers
        rest = self._unread.lstrip()
        if not is_end and len(rest) < len(marker) and marker.startswith(rest):
            return False
        self._spaces += self._unread[: len(self._unread) - len(rest)]
        self._unread = rest.removeprefix(marker)
        if rest.startswith(marker):
            self._lead = marker
        self._state = self._at_call
        return True

    def _at_call(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._lead += self._unread[: len(self._unread) - len(rest)]
            self._unread = rest
            self._begin(ObjectCall(needs_arguments=True))
        else:
            self._fail()
        return True

    def _after_call(self, is_end: bool) -> bool:
        """Expects a semicolon and another call, or text."""
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == ";" and not rest[1:].lstrip() and not is_end:
            return False
        if rest[0] == ";" and rest[1:].lstrip()[:1] == "{":
            beyond = rest[1:].lstrip()
            self._lead = self._unread[: len(self._unread) - len(beyond)]
            self._unread = beyond
            self._begin(ObjectCall(needs_arguments=True))
        else:
            self._state = self._only_text
        return True

    def _after_failure(self, is_end: bool) -> bool:
        self._state = self._only_text
        return True

    def _only_text(self, is_end: bool) -> bool:
        self._write(self._unread)
        self._unread = ""
        return False


_MISTRAL_CALL = re.compile(r"\s*([\w.-]{1,256})(?:\[CALL_ID\]([\w-]{1,64}))?(?:\[ARGS\])?\s*(?=\{)")
_MISTRAL_CALL_BEGINNING = re.compile(r"[\w.\-\[\]\s]{0,400}")


class MistralParser(ToolParser):
    """Mistral's marker is followed by a list of objects (older models), or by a name and its arguments."""

    name = "mistral"
    markers = ("[TOOL_CALLS]",)

    def _before(self, is_end: bool) -> bool:
        (marker,) = self.markers
        if not self._finds(marker, is_end):
            return False
        self._lead = marker
        self._is_list = False
        self._state = self._after_marker
        return True

    def _after_marker(self, is_end: bool) -> bool:
        rest = self._unread.lstrip()
        if not rest:
            return False
        if rest[0] == "[":
            self._is_list = True
            self._skip(len(self._unread) - len(rest) + 1)
            self._state = self._at_object
        elif named := _MISTRAL_CALL.match(self._unread):
            self._skip(named.end())
            self._begin(NamedCall(named[1], named[2]))
        elif is_end or "{" in rest or not _MISTRAL_CALL_BEGINNING.fullmatch(rest):
            self._fail()
        else:
            return False
        return True

    def _at_object(self, is_end: bool) -> bool:
        self._skip(len(self._unread) - len(self._unread.lstrip()))
        if self._unread.startswith("{"):
            self._begin(ObjectCall())
        elif self._unread:
            self._fail()
        return True

    def _skip(self, num_chars: int) -> None:
        self._lead += self._unread[:num_chars]
        self._unread = self._unread[num_chars:]

    def _after_call(self, is_end: bool) -> bool:
        rest = self._unread.lstrip() if self._is_list else ""
        if self._is_list and not rest:
            return False
        if rest[:1] == ",":
            self._skip(len(self._unread) - len(rest) + 1)
            self._state = self._at_object
            return True
        if rest[:1] == "]":
            self._unread = rest[1:]
        self._state = self._before
        return True


PARSERS: dict[str, type[HermesParser] | type[LlamaParser] | type[MistralParser]] = {
    parser.name: parser for parser in (HermesParser, LlamaParser, MistralParser)
}
_ALIASES = {"qwen": "hermes", "qwen2": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "llama": "llama3_json"}
