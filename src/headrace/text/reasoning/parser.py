"""The base of all reasoning formats: separates a model's reasoning from the text of its answer as it arrives.

The result does not depend on how the text was split into pieces, and no part of a tag is ever text. White space next
to tags is dropped. An answer that ends before its reasoning does is all reasoning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from headrace.text.answer_parts import ContentDelta, Delta, ReasoningDelta, joined
from headrace.text.tools.parser import overlap


class ReasoningParser(ABC):
    """Reads one answer. Its content may have tool calls, which a `ToolParser` reads from it."""

    name: ClassVar[str]  # vLLM's
    aliases: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[str]  # which write this format, for the documentation
    markers: ClassVar[tuple[str, ...]]  # if these are special tokens, they must not be skipped
    starts_inside: ClassVar[bool] = False  # the answer, if the prompt says nothing

    @abstractmethod
    def __init__(self, *, is_inside: bool | None = None, call_markers: Sequence[str] = ()) -> None:
        """`is_inside`: whether the prompt ended inside the reasoning; None: the format's default. `call_markers`: what
        starts a tool call, which ends reasoning that was not closed."""

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Tells whether a chat template shows this format."""

    @classmethod
    @abstractmethod
    def state_after(cls, prompt: str) -> bool | None:
        """Tells whether a prompt ends inside the reasoning, or after it; None if it says nothing."""

    @classmethod
    @abstractmethod
    def starts(cls) -> tuple[str, ...]:
        """Returns the texts that start the reasoning, the usual one first."""

    @classmethod
    @abstractmethod
    def ends(cls) -> tuple[str, ...]:
        """Returns the texts after which the answer proper starts, the usual one first."""

    @abstractmethod
    def push(self, text: str) -> list[Delta]: ...

    @abstractmethod
    def finish(self) -> list[Delta]: ...


class TagParser(ReasoningParser):
    """Reasoning between tags, at the start of the answer.

    _maybe ── a start tag ──▶ _inside ── an end tag, or a tool call ──▶ _before_text ──▶ _in_text
      └─────────── any other text ──────────────────────────────────────────▶┘
    """

    start_tags: ClassVar[tuple[str, ...]] = ("<think>",)
    end_tags: ClassVar[tuple[str, ...]] = ("</think>",)
    wrapper: ClassVar[tuple[str, str] | None] = None  # tags around the answer proper

    def __init__(self, *, is_inside: bool | None = None, call_markers: Sequence[str] = ()) -> None:
        self._call_markers = tuple(call_markers)
        self._unread = ""
        self._spaces = ""  # white space at the end of the reasoning, dropped if it is its end
        self._out: list[Delta] = []
        self._has_text = False  # reasoning has started
        self._drops_spaces = True  # before the text
        self._is_wrapped = False
        if is_inside is None:
            self._state = self._inside if self.starts_inside else self._maybe
        else:
            self._state = self._inside if is_inside else self._before_text

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.start_tags[0] in template or cls.end_tags[0] in template

    @classmethod
    def state_after(cls, prompt: str) -> bool | None:
        end = prompt.rstrip()
        if end.endswith(cls.start_tags):
            return True
        return False if end.endswith(cls.end_tags) else None

    @classmethod
    def starts(cls) -> tuple[str, ...]:
        return cls.start_tags

    @classmethod
    def ends(cls) -> tuple[str, ...]:
        return cls.end_tags

    def push(self, text: str) -> list[Delta]:
        self._unread += text
        self._read(is_end=False)
        return self._take_out()

    def finish(self) -> list[Delta]:
        self._read(is_end=True)
        return self._take_out()

    def _read(self, *, is_end: bool) -> None:
        while self._unread and self._state(is_end):
            pass

    def _take_out(self) -> list[Delta]:
        deltas, self._out = joined(self._out), []
        return deltas

    # ---- states: what they return tells whether to continue; False waits for more text

    def _maybe(self, is_end: bool) -> bool:
        start = self._at_start(self.start_tags, is_end)
        if start is None:
            return False
        if start:
            self._unread = self._unread.lstrip()[len(start) :]
        self._drops_spaces = bool(start)  # white space at the start of an answer without reasoning is text
        self._state = self._inside if start else self._before_text
        return True

    def _at_start(self, tags: Sequence[str], is_end: bool) -> str | None:
        """Returns the tag that comes first, or nothing if there is none; None: more text is needed to tell."""
        rest = self._unread.lstrip()
        for tag in tags:
            if rest.startswith(tag):
                return tag
        return None if not is_end and any(tag.startswith(rest) for tag in tags) else ""

    def _inside(self, is_end: bool) -> bool:
        if not self._has_text:
            start = self._at_start((*self.start_tags, *self.end_tags, *self._call_markers), is_end)
            if start is None:
                return False
            self._unread = self._unread.lstrip()
            if start in self.start_tags:  # the prompt had it already
                self._unread = self._unread[len(start) :]
                return True
        found = self._before_tag((*self.end_tags, *self._call_markers), is_end)
        if found is None:
            return False
        self._spaces = ""
        self._unread = self._unread.removeprefix(found) if found in self.end_tags else self._unread
        self._state = self._before_text
        return True

    def _before_tag(self, tags: Sequence[str], is_end: bool) -> str | None:
        """Emits the reasoning before a tag, and returns the tag; a possible prefix of one stays."""
        places = {tag: place for tag in tags if (place := self._unread.find(tag)) >= 0}
        found = min(places, key=places.__getitem__) if places else None
        num_kept = 0 if is_end else max(overlap(self._unread, tag) for tag in tags)
        end = len(self._unread) - num_kept if found is None else places[found]
        self._reason(self._unread[:end])
        self._unread = self._unread[end:]
        return found

    def _reason(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._out.append(ReasoningDelta(self._spaces + body))
            self._spaces, self._has_text = "", True
        self._spaces += text[len(body) :] if self._has_text else ""

    def _before_text(self, is_end: bool) -> bool:
        start = "" if self.wrapper is None or self._is_wrapped else self._at_start(self.wrapper[:1], is_end)
        if start is None:
            return False
        if start:
            self._is_wrapped = self._drops_spaces = True
            self._unread = self._unread.lstrip()[len(start) :]
        if self._drops_spaces:
            self._unread = self._unread.lstrip()
        if self._unread:
            self._state = self._in_text
        return bool(self._unread)

    def _in_text(self, is_end: bool) -> bool:
        """Emits text; what closes its wrapper is dropped at the end of the answer."""
        num_kept = self._num_closing()
        end = len(self._unread) - num_kept
        text = self._unread[:end]
        if text:
            self._out.append(ContentDelta(text))
        self._unread = self._unread[end:]
        if is_end:
            self._end_text()
        return False

    def _num_closing(self) -> int:
        """Returns how much of the end of the text may be what closes it."""
        if not self._is_wrapped or self.wrapper is None:
            return 0
        rest, close = self._unread.rstrip(), self.wrapper[1]
        kept = len(close) if rest.endswith(close) else overlap(rest, close) if rest == self._unread else 0
        body = rest[: len(rest) - kept].rstrip()
        return len(self._unread) - len(body)

    def _end_text(self) -> None:
        if self.wrapper is None or self._unread.strip() != self.wrapper[1]:
            self._out.append(ContentDelta(self._unread))
        self._unread = ""
