"""`chat_template` and `default_chat_template_kwargs`: another chat template than the model's, and its variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError, nearest
from headrace.text import ChatTemplate, Tokenizer

_OF_TEMPLATES = frozenset("{}\n")  # characters that a text has and the name of a file has not
_HINTS = ("enable_thinking", "thinking", "reasoning_effort")  # given to all models; many templates do not read them


def with_chat_settings(tokenizer: Tokenizer, config: EngineConfig) -> Tokenizer:
    """The tokenizer with the config's chat template and variables. Raises a ConfigError for a template that cannot be
    read, and for a variable that it does not have."""
    if config.chat_template is None and not config.default_chat_template_kwargs:
        return tokenizer
    template = tokenizer.chat_template
    if config.chat_template is not None:
        template = ChatTemplate(read_chat_template(config.chat_template), tokenizer.special_tokens)
        if (error := template.syntax_error) is not None:
            raise ConfigError(f"chat_template is not a Jinja template: {error}")
    if template is None:
        raise ConfigError("default_chat_template_kwargs: the model has no chat template; give one as chat_template")
    defaults = _checked(config.default_chat_template_kwargs or {}, template)
    return tokenizer.with_chat_template(ChatTemplate(template.templates, template.special_tokens, defaults))


def read_chat_template(given: str) -> str:
    """The text of a template that is given as a file or as the text itself."""
    if _OF_TEMPLATES & set(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template={given!r} cannot be read ({reason}); give a file, or the text of a template"
        ) from error


def _checked(defaults: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    read = template.variables
    for name in defaults:
        if name not in read and name not in _HINTS:
            raise ConfigError(
                f"default_chat_template_kwargs: the chat template has no variable {name!r}{nearest(name, read)}"
            )
    return {name: value for name, value in defaults.items() if name in read}
