"""The settings that name the parsers of answers, of the server and of jobs."""

from __future__ import annotations

import msgspec

AUTO = "auto"


class ParserNames(msgspec.Struct, frozen=True):
    """ "auto": the parser that the model's chat template shows."""

    tool_call: str = AUTO
    reasoning: str = AUTO


AUTOMATIC = ParserNames()


def check_parser_names(names: ParserNames) -> None:
    """Refuses names that no parser has."""
    if names.tool_call != AUTO:
        from headrace.text.tool_calls import check_parser_name  # it imports the tokenizer library

        check_parser_name(names.tool_call)
    if names.reasoning != AUTO:
        from headrace.text.reasoning.formats import check_reasoning_name

        check_reasoning_name(names.reasoning)
