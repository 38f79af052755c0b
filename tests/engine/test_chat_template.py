"""`chat_template` and `default_chat_template_kwargs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.chat_template import with_chat_settings
from headrace.engine.prompts import PromptReader
from headrace.errors import ConfigError
from headrace.jobs.input.prepare_wire import SentTokenizer
from headrace.openai.prompts import render_chat
from headrace.text import TextSource, Tokenizer, load_tokenizer

TEMPLATE = "{{ style }}{% for message in messages %}<{{ message.content }}>{% endfor %}"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return load_tokenizer(TextSource(directory=tiny_directory))


def _rendered(tokenizer: Tokenizer, **variables: object) -> str:
    return render_chat(PromptReader(tokenizer, tokenizer.vocab_size), MESSAGES, variables)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_template_is_a_file_or_a_text(tokenizer: Tokenizer, tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    config = EngineConfig(chat_template=str(path) if is_file else TEMPLATE)
    assert _rendered(with_chat_settings(tokenizer, config)) == "<hi>"


def test_requests_override_the_default_variables(tokenizer: Tokenizer) -> None:
    config = EngineConfig(chat_template=TEMPLATE, default_chat_template_kwargs={"style": "short"})
    changed = with_chat_settings(tokenizer, config)
    assert _rendered(changed) == "short<hi>"
    assert _rendered(changed, style="long") == "long<hi>"


def test_a_jobs_processes_get_the_same_template_and_variables(tokenizer: Tokenizer) -> None:
    config = EngineConfig(chat_template=TEMPLATE, default_chat_template_kwargs={"style": "short"})
    assert _rendered(SentTokenizer.of(with_chat_settings(tokenizer, config)).restored()) == "short<hi>"


def test_a_hint_about_reasoning_that_the_template_does_not_read_changes_nothing(tokenizer: Tokenizer) -> None:
    config = EngineConfig(chat_template=TEMPLATE, default_chat_template_kwargs={"enable_thinking": False})
    assert _rendered(with_chat_settings(tokenizer, config)) == "<hi>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(chat_template="none.jinja"), r"'none.jinja' cannot be read \(No such file or directory\)"),
        (EngineConfig(chat_template="{% if %}"), "not a Jinja template: line 1"),
        (
            EngineConfig(chat_template=TEMPLATE, default_chat_template_kwargs={"styl": 1}),
            "no variable 'styl', did you mean 'style'",
        ),
    ],
)
def test_what_the_template_cannot_use_is_refused_at_the_start(
    tokenizer: Tokenizer, config: EngineConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_chat_settings(tokenizer, config)


def test_variables_without_a_template_are_refused(tokenizer: Tokenizer) -> None:
    plain = Tokenizer.of_serialized(tokenizer.serialized())
    with pytest.raises(ConfigError, match="the model has no chat template"):
        with_chat_settings(plain, EngineConfig(default_chat_template_kwargs={"style": "short"}))
