"""gpt-oss: an answer is a few messages on channels (the harmony format).

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The prompt ends with `<|start|>assistant`. Messages to a function are passed on as they are, with their header, for the
tool parser; commentary without a recipient is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.text.answer_parts import ContentDelta, Delta, ReasoningDelta, joined
from headrace.text.reasoning.parser import ReasoningParser
from headrace.text.tools.parser import overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CALL = "<|call|>"
_BODY_ENDS = ("<|end|>", "<|return|>", _CALL, _START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=(functions\.[\w.-]+)")
_HEADER_STARTS = (_START, _CHANNEL, "to=")
_MAX_HEADER_LEN = 1024
_FINAL = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")


class GptOssParser(ReasoningParser):
    name = "openai_gptoss"
    aliases = ("gpt_oss", "openai")
    models = "gpt-oss"
    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>", "<|return|>")

    def __init__(self, *, is_inside: bool | None = None, call_markers: Sequence[str] = ()) -> None:
        self._unread = ""
        self._out: list[Delta] = []
        self._state = self._at_start
        self._kind: type[ReasoningDelta] | type[ContentDelta] = ContentDelta
        self._is_call = False
        self._has = {ReasoningDelta: False, ContentDelta: False}
        self._is_new = False  # nothing of the current message was emitted

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    @classmethod
    def state_after(cls, prompt: str) -> bool | None:
        return None

    @classmethod
    def starts(cls) -> tuple[str, ...]:
        return (_CHANNEL,)

    @classmethod
    def ends(cls) -> tuple[str, ...]:
        return _FINAL

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        return self._read(is_end=False)

    def finish(self) -> list[Delta]:
        deltas = self._read(is_end=True)
        if self._unread and self._state == self._in_header:  # half a header
            deltas.append(ContentDelta(self._unread))
            self._unread = ""
        return joined(deltas)

    def _read(self, *, is_end: bool) -> list[Delta]:
        while self._unread and self._state(is_end):
            pass
        deltas, self._out = joined(self._out), []
        return deltas

    def _at_start(self, is_end: bool) -> bool:
        """An answer that does not start with a header is text."""
        rest = self._unread.lstrip()
        if not is_end and any(start.startswith(rest) for start in _HEADER_STARTS):
            return False
        self._state = self._in_header
        if not rest.startswith(_HEADER_STARTS):
            self._begin(ContentDelta, is_call=False)
        return True

    def _in_header(self, is_end: bool) -> bool:
        header, found, rest = self._unread.partition(_MESSAGE)
        if not found:
            if len(header) > _MAX_HEADER_LEN:
                self._begin(ContentDelta, is_call=False)
                return True
            return False
        channel, function = _CHANNEL_NAME.search(header), _FUNCTION.search(header)
        self._unread = rest
        is_analysis = channel is not None and channel[1] == "analysis"
        self._begin(ReasoningDelta if is_analysis and function is None else ContentDelta, is_call=function is not None)
        if function is not None:
            self._out.append(ContentDelta(f"{_CHANNEL}commentary to={function[1]} <|constrain|>json{_MESSAGE}"))
        return True

    def _begin(self, kind: type[ReasoningDelta] | type[ContentDelta], *, is_call: bool) -> None:
        self._kind, self._is_call, self._is_new = kind, is_call, True
        self._state = self._in_body

    def _in_body(self, is_end: bool) -> bool:
        places = {end: place for end in _BODY_ENDS if (place := self._unread.find(end)) >= 0}
        if not places:
            num_kept = 0 if is_end else max(overlap(self._unread, end) for end in _BODY_ENDS)
            self._emit(self._unread[: len(self._unread) - num_kept])
            self._unread = self._unread[len(self._unread) - num_kept :]
            return False
        found = min(places, key=places.__getitem__)
        self._emit(self._unread[: places[found]])
        if self._is_call:
            self._out.append(ContentDelta(_CALL))
        is_header = found in (_START, _CHANNEL)
        self._unread = self._unread[places[found] + (0 if is_header else len(found)) :]
        self._state = self._in_header if is_header else self._between
        return True

    def _between(self, is_end: bool) -> bool:
        """Expects the next header."""
        rest = self._unread.lstrip()
        if not is_end and any(start.startswith(rest) for start in (_START, _CHANNEL)):
            return False
        if rest.startswith((_START, _CHANNEL)):
            self._unread = rest
            self._state = self._in_header
        elif rest:
            self._begin(ContentDelta, is_call=False)
        else:
            return False
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._is_new and self._has[self._kind] and not self._is_call:
            text = "\n" + text  # messages of the same kind are lines
        self._is_new = False
        self._has[self._kind] = self._has[self._kind] or not self._is_call
        self._out.append(self._kind(text))
