"""The formats of tool calls: chosen by name or by the model's chat template, and read from text.

A format is one class in `tools/`, listed here.
"""

from __future__ import annotations

from headrace.errors import ConfigError, RequestError, nearest
from headrace.text.answer_parts import (
    ContentDelta,
    Delta,
    ParsedAnswer,
    ToolCall,
    ToolCallDelta,
    put_together,
)
from headrace.text.tools.headed import DeepSeekV3Parser, DeepSeekV31Parser, GptOssParser, KimiK2Parser
from headrace.text.tools.hermes import HermesParser, InternlmParser, LongcatParser
from headrace.text.tools.json_lists import (
    CohereParser,
    GraniteParser,
    JambaParser,
    NemotronParser,
    Phi4MiniParser,
    XlamParser,
)
from headrace.text.tools.llama import LlamaParser
from headrace.text.tools.mistral import MistralParser
from headrace.text.tools.parser import MakeId, ToolParser, Tools, new_call_id
from headrace.text.tools.pythonic import Lfm2Parser, Llama4PythonicParser, Olmo3Parser, PythonicParser
from headrace.text.tools.tagged import (
    DeepSeekV32Parser,
    Glm45Parser,
    MiniMaxM2Parser,
    Qwen3CoderParser,
    SeedOssParser,
)

__all__ = [
    "FORMATS",
    "PARSERS",
    "ContentDelta",
    "Delta",
    "ParsedAnswer",
    "ToolCall",
    "ToolCallDelta",
    "ToolParser",
    "check_parser_name",
    "new_call_id",
    "parse",
    "parser_for",
    "parser_name_for",
    "put_together",
]

AUTO = "auto"

# In the order in which a template is tried: a format before those whose markers it shares.
FORMATS: tuple[type[ToolParser], ...] = (
    GptOssParser,
    MistralParser,
    Qwen3CoderParser,
    Glm45Parser,
    KimiK2Parser,
    MiniMaxM2Parser,
    SeedOssParser,
    DeepSeekV32Parser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    CohereParser,
    InternlmParser,
    LongcatParser,
    Lfm2Parser,
    Olmo3Parser,
    Phi4MiniParser,
    GraniteParser,
    NemotronParser,
    HermesParser,
    JambaParser,
    Llama4PythonicParser,
    PythonicParser,
    LlamaParser,
    XlamParser,
)
PARSERS: dict[str, type[ToolParser]] = {parser.name: parser for parser in FORMATS}
_BY_ANY_NAME = {name: parser for parser in FORMATS for name in (parser.name, *parser.aliases)}


def parser_for(
    name_or_template: str | None,
    tools: Tools | None = None,
    make_id: MakeId | None = None,
    *,
    whole_calls: bool = False,
) -> ToolParser:
    """Returns the parser with this name, or the one whose format a chat template shows; Hermes if it shows none.

    `tools`: calls of other tools are text; with the types of their parameters, values that are bare text become what
    the type says. `whole_calls`: a call is announced when it is complete.
    """
    parser = _BY_ANY_NAME[parser_name_for(name_or_template)]
    return parser(tools, make_id or new_call_id, whole_calls=whole_calls)


def parser_name_for(name_or_template: str | None) -> str:
    given = name_or_template or ""
    if given in _BY_ANY_NAME:
        return _BY_ANY_NAME[given].name
    if given and "{" not in given:  # a template contains braces
        known = ", ".join(PARSERS)
        raise RequestError(
            f"unknown tool parser {given!r}{nearest(given, _BY_ANY_NAME)}; known are {known}", param="tools"
        )
    return next((parser.name for parser in FORMATS if parser.fits(given)), HermesParser.name)


def check_parser_name(name: str) -> None:
    """Refuses the setting `tool_call_parser` if no parser has this name."""
    if name != AUTO and name not in _BY_ANY_NAME:
        known = sorted(_BY_ANY_NAME)
        valid = ", ".join([AUTO, *known])
        raise ConfigError(f"tool_call_parser {name!r} is unknown{nearest(name, known)}; use one of {valid}")


def parse(text: str, name_or_template: str | None, tools: Tools | None = None) -> ParsedAnswer:
    """Parses a whole answer at once."""
    parser = parser_for(name_or_template, tools, whole_calls=True)
    return put_together([*parser.push(text), *parser.finish()])
