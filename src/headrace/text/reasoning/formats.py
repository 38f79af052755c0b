"""The reasoning formats: chosen by name or by the model's chat template. A format is one class, listed here."""

from __future__ import annotations

from headrace.errors import ConfigError, nearest
from headrace.text.reasoning.gpt_oss import GptOssParser
from headrace.text.reasoning.parser import ReasoningParser
from headrace.text.reasoning.tags import (
    CohereParser,
    DeepSeekR1Parser,
    DeepSeekV3Parser,
    Ernie45Parser,
    Glm45Parser,
    GraniteParser,
    HunyuanParser,
    MistralParser,
    Qwen3Parser,
    SeedOssParser,
)

AUTO, NONE = "auto", "none"

# In the order in which a template is tried: a format before those whose tags it shares.
FORMATS: tuple[type[ReasoningParser], ...] = (
    GptOssParser,
    MistralParser,
    SeedOssParser,
    CohereParser,
    GraniteParser,
    Ernie45Parser,
    HunyuanParser,
    Glm45Parser,
    DeepSeekV3Parser,
    DeepSeekR1Parser,
    Qwen3Parser,
)
_BY_ANY_NAME = {name: parser for parser in FORMATS for name in (parser.name, *parser.aliases)}


def reasoning_format(name: str, template: str | None) -> type[ReasoningParser] | None:
    """Returns the format with this name; for "auto" the one that the chat template shows; None: no reasoning."""
    if name == NONE:
        return None
    if name != AUTO:
        return _BY_ANY_NAME[name]
    return next((parser for parser in FORMATS if template and parser.fits(template)), None)


def check_reasoning_name(name: str) -> None:
    """Refuses the setting `reasoning_parser` if no parser has this name."""
    known = [AUTO, NONE, *sorted(_BY_ANY_NAME)]
    if name not in known:
        valid = ", ".join(known)
        raise ConfigError(f"reasoning_parser {name!r} is unknown{nearest(name, known)}; use one of {valid}")
