"""The output of a response: the items that an answer is made of, whole or as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.openai.answer_format import AnswerFormat
from headrace.openai.response_items import pack_reasoning
from headrace.text.answer_parts import ContentDelta, Delta, ToolCallDelta

Kind = Literal["message", "function_call", "reasoning"]
MakeId = Callable[[str], str]  # from a prefix

ID_PREFIXES: dict[Kind, str] = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}


@dataclass(slots=True)
class OutputItem:
    """One item. Owned by its `Output`."""

    kind: Kind
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)  # of the text, the reasoning or the arguments

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def to_json(
        self, status: str, *, logprobs: list[dict[str, Any]] | None = None, packs_reasoning: bool = False
    ) -> dict[str, Any]:
        """`in_progress` is the item before its first text."""
        is_empty = status == "in_progress"
        match self.kind:
            case "message":
                content = [] if is_empty else [text_part(self.text, logprobs)]
                return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
            case "function_call":
                call = {"call_id": self.call_id, "name": self.name, "arguments": "" if is_empty else self.text}
                return {"id": self.id, "type": "function_call", "status": status, **call}
            case "reasoning":
                content = [] if is_empty else [reasoning_part(self.text)]
                packed = pack_reasoning(self.text) if packs_reasoning and not is_empty else None
                members = {"summary": [], "content": content, "encrypted_content": packed}
                return {"id": self.id, "type": "reasoning", "status": status, **members}


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def whole_deltas(format: AnswerFormat | None, text: str) -> list[Delta]:
    """The parts of a whole answer. Calls that are cut short are text, unless they were forced."""
    if format is None:
        return [ContentDelta(text)]
    is_forced = format.calls is not None and format.calls.is_forced
    return format.reader(whole_calls=not is_forced).read(text, is_end=True)


class Output:
    """The items of one answer, from its deltas. Only the last one grows."""

    def __init__(self, make_id: MakeId) -> None:
        self.items: list[OutputItem] = []
        self._make_id = make_id

    @classmethod
    def of(cls, deltas: Iterable[Delta], make_id: MakeId) -> Output:
        output = cls(make_id)
        for delta in deltas:
            output.take(delta)
        return output

    @property
    def last(self) -> OutputItem | None:
        return self.items[-1] if self.items else None

    def take(self, delta: Delta) -> OutputItem:
        """Add a delta to its item, which it may start, and return the item."""
        if isinstance(delta, ToolCallDelta):
            item = self._call(delta)
            item.texts.append(delta.arguments)
            return item
        item = self._text("message" if isinstance(delta, ContentDelta) else "reasoning")
        item.texts.append(delta.text)
        return item

    def close(self) -> None:
        """An answer without any text is an empty message."""
        if not self.items:
            self._text("message")

    @property
    def reasoning(self) -> str:
        return "".join(item.text for item in self.items if item.kind == "reasoning")

    def _text(self, kind: Kind) -> OutputItem:
        last = self.last
        return last if last is not None and last.kind == kind else self._start(kind)

    def _call(self, delta: ToolCallDelta) -> OutputItem:
        if delta.name is None:
            return next(item for item in reversed(self.items) if item.kind == "function_call")
        item = self._start("function_call")
        item.call_id, item.name = delta.id or "", delta.name
        return item

    def _start(self, kind: Kind) -> OutputItem:
        item = OutputItem(kind, self._make_id(ID_PREFIXES[kind]), len(self.items))
        self.items.append(item)
        return item
