"""A job's engine without a model: the real loop over a fake runner, and a byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.config import EngineConfig
from headrace.engine.client import Deliver, EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.fake_settings import fake_settings
from headrace.engine.grammars import Grammars
from headrace.engine.settings import Choice, Settings
from headrace.engine.start import Engine
from headrace.models import ModelSpec
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.text import ChatTemplate, Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[reply]{% endif %}"
)
VOCAB_SIZE = 258
EOS_TOKEN_ID = 256
ASCII = 128  # the fake runner samples from these, so that every answer is text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes, then </s> and <s>."""
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    tokens = [*(spelled[byte] for byte in range(256)), "</s>", "<s>"]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("</s>", "<s>")])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, chat_template=ChatTemplate(TEMPLATE))


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., Engine]:
    return starter(tokenizer)


def starter(tokenizer: Tokenizer) -> Callable[..., Engine]:
    """Like `start_engine`, for a fake model whose next token is a hash."""

    def start(config: EngineConfig, deliver: Deliver, *, runner: FakeRunner | None = None) -> Engine:
        settings = settings_of(config)
        runner = runner or FakeRunner(max_num_seqs=settings.max_num_seqs, vocab_size=ASCII)
        grammars = Grammars(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))
        core = EngineCore(
            Scheduler(settings.limits), runner, eos_token_ids=(EOS_TOKEN_ID,), seed=config.seed, grammars=grammars
        )
        return Engine(
            client=EngineClient(core, deliver),
            settings=settings,
            spec=cast(ModelSpec, SimpleNamespace(vocab_size=VOCAB_SIZE, pooler=None, is_encoder=False)),
            tokenizer=tokenizer,
            eos_token_ids=(EOS_TOKEN_ID,),
            model_name="fake",
            start_seconds=0.5,
            grammars=grammars,
        )

    return start


def settings_of(config: EngineConfig) -> Settings:
    return fake_settings(
        max_model_len=config.max_model_len or 512,
        max_num_seqs=config.max_num_seqs or 8,
        max_num_batched_tokens=128,
        num_blocks=512,
        seed=config.seed,
        choices=(Choice("max_num_seqs", "8", "small enough for a test"),),
    )


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Lines to a file: objects as JSON, text and bytes as they are."""

    def write(*lines: Any, name: str = "in.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(_encode(line) + b"\n" for line in lines))
        return path

    return write


def _encode(line: Any) -> bytes:
    if isinstance(line, bytes):
        return line
    return line.encode() if isinstance(line, str) else json.dumps(line).encode()
