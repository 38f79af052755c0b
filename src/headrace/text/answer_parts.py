"""The parts of an answer, as deltas of a stream: reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.text.tool_calls import ContentDelta, ToolCallDelta

__all__ = ["ContentDelta", "Delta", "ReasoningDelta", "ToolCallDelta"]


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta
