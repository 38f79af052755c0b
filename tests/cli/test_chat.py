"""Chats over the real engine loop, with a fake runner and a tokenizer of letters."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.cli.chat import answer_lines, chat_in_terminal, run_command
from headrace.cli.conversation import Conversation
from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.fake_settings import fake_settings
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.errors import ModelError
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.text import ChatTemplate, Tokenizer
from headrace.types import SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def build_tokenizer(*, can_chat: bool = True) -> Tokenizer:
    backend = Backend(models.WordLevel({letter: place for place, letter in enumerate(LETTERS)}, unk_token="z"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, chat_template=ChatTemplate(TEMPLATE) if can_chat else None)


def build_settings() -> Settings:
    return fake_settings(max_model_len=128, max_num_seqs=2, block_size=4)


def build_conversation(params: SamplingParams, *, can_chat: bool = True, system: str | None = None) -> Conversation:
    settings = build_settings()
    events: SimpleQueue[Any] = SimpleQueue()
    core = EngineCore(Scheduler(settings.limits), FakeRunner(max_num_seqs=2, vocab_size=len(LETTERS)))
    engine = Engine(
        client=EngineClient(core, events.put),
        settings=settings,
        spec=cast(Any, SimpleNamespace(vocab_size=len(LETTERS))),
        tokenizer=build_tokenizer(can_chat=can_chat),
        eos_token_ids=(),
        model_name=EngineConfig().model,
        start_seconds=1.0,
    )
    try:
        return Conversation(engine, events, params, system=system)
    except BaseException:
        engine.close()
        raise


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    with build_conversation(SamplingParams(max_tokens=6, seed=1), system="be") as made:
        yield made


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fakes the user's input; an exception is Ctrl-C or Ctrl-D."""

    def types(*entries: str | BaseException) -> None:
        left = iter(entries)

        def answer(prompt: str) -> str:
            entry = next(left)
            if isinstance(entry, BaseException):
                raise entry
            return entry

        monkeypatch.setattr("builtins.input", answer)

    return types


def test_an_answer_is_shown_in_pieces_and_kept_in_the_history(conversation: Conversation) -> None:
    pieces: list[str] = []
    turn = conversation.ask("hi", pieces.append)
    assert len(pieces) > 1 and len("".join(pieces)) == 6
    assert not turn.was_stopped
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[-1]["content"] == "".join(pieces)


def test_the_second_turn_takes_the_first_from_the_cache(conversation: Conversation) -> None:
    assert " 0 of 7 prompt tokens from the cache" in conversation.ask("hi", lambda piece: None).stats
    assert " 12 of 17 prompt tokens from the cache" in conversation.ask("go", lambda piece: None).stats


def test_ctrl_c_ends_the_answer_and_keeps_the_partial_text(conversation: Conversation) -> None:
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        raise KeyboardInterrupt

    turn = conversation.ask("hi", show)
    assert turn.was_stopped
    assert conversation.messages[-1]["content"].startswith(shown[0])
    assert not conversation.ask("again", lambda piece: None).was_stopped


def test_clear_keeps_only_the_system_message(conversation: Conversation) -> None:
    conversation.ask("hi", lambda piece: None)
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be"}]


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        build_conversation(SamplingParams(), can_chat=False)


def test_a_chat_continues_until_the_user_leaves(
    conversation: Conversation, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hi", "", KeyboardInterrupt(), "/help", "/claer", "/clear", "/exit")
    chat_in_terminal(conversation)
    out, err = capsys.readouterr()
    assert "6 tokens" in err
    assert "(type /exit or press Ctrl-D to leave)" in out
    assert "clear the conversation" in out
    assert "unknown command /claer, did you mean '/clear'?" in out
    assert "(conversation cleared)" in out


def test_the_end_of_input_ends_the_chat(
    conversation: Conversation, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed(EOFError())
    chat_in_terminal(conversation)
    assert "tokens" not in capsys.readouterr().err  # nothing was answered


def test_piped_questions_are_answered_one_per_line(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/clear\nthree\n/exit\nnever\n"))
    answer_lines(conversation)
    out, err = capsys.readouterr()
    assert [len(line) for line in out.splitlines()] == [6, 6, 6]
    assert err == ""


def test_a_chat_that_exceeds_the_context_explains_what_to_do(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * 200 + "\nhi\n"))
    answer_lines(conversation)
    out, err = capsys.readouterr()
    assert "maximum context length is 128 tokens" in err and "/clear starts a new conversation" in err
    assert len(out.splitlines()) == 1


def test_help_lists_the_commands(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("/help", conversation)
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"/clear", "/help", "/exit"}
