"""The parts of an answer: reasoning, text and tool calls, as deltas of a stream or whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


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


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON text


Part = ReasoningPart | TextPart | ToolCall


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer; its parts of one kind are joined."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    reasoning: str = ""


def put_together(deltas: Iterable[Delta]) -> ParsedAnswer:
    parts = parts_of(deltas)
    return ParsedAnswer(
        "".join(part.text for part in parts if isinstance(part, TextPart)),
        tuple(part for part in parts if isinstance(part, ToolCall)),
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
    )


def parts_of(deltas: Iterable[Delta]) -> list[Part]:
    """Returns the parts in the order in which they began; neighbours of the same kind are one part."""
    parts: list[Part] = []
    place_of_call: dict[int, int] = {}
    for delta in joined(deltas):
        if isinstance(delta, ReasoningDelta):
            parts.append(ReasoningPart(delta.text))
        elif isinstance(delta, ContentDelta):
            parts.append(TextPart(delta.text))
        elif delta.index not in place_of_call:
            place_of_call[delta.index] = len(parts)
            parts.append(ToolCall(delta.id or "", delta.name or "", delta.arguments))
        else:
            place = place_of_call[delta.index]
            call = parts[place]
            assert isinstance(call, ToolCall)
            parts[place] = ToolCall(call.id, call.name, call.arguments + delta.arguments)
    return parts


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Returns the deltas with consecutive ones of reasoning, text or one call's arguments joined."""
    kept: list[Delta] = []
    for delta in deltas:
        last = kept[-1] if kept else None
        if isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            kept[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            kept[-1] = ContentDelta(last.text + delta.text)
        else:
            kept.append(delta)
    return kept
