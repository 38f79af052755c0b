"""Which log-probabilities belong to a part of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.openai.logprobs import entries_of_text
from headrace.text import TextSource, Tokenizer, load_tokenizer
from headrace.types import TokenLogprobs


@pytest.fixture
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return load_tokenizer(TextSource(directory=tiny_directory))


def test_a_text_at_the_end_has_the_entries_of_its_own_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("why", False), *tokenizer.encode("yes", False), *tokenizer.eos_token_ids]
    entries = [TokenLogprobs(token, -1.0, 1) for token in ids]
    assert entries_of_text(entries, "yes", tokenizer) == entries[3:6], "without what ends the answer"
    assert entries_of_text(entries, "", tokenizer) == []
    assert entries_of_text(entries[:3], "whywhy", tokenizer) == entries[:3], "what was not sampled has none"
