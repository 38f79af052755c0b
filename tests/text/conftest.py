"""The tokenizers of `builders`, built once."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from headrace.text import Tokenizer
from tests.text import builders


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return builders.byte_tokenizer()


@pytest.fixture(scope="session")
def tokenizers_by_kind() -> dict[str, Tokenizer]:
    """One tokenizer for each way of decoding."""
    return {
        "bytes": builders.byte_tokenizer(["the", " the", "é", "日本", "🙂"]),
        "llama": builders.sentencepiece_tokenizer(builders.llama_decoder()),
        "gemma": builders.sentencepiece_tokenizer(builders.gemma_decoder()),
        "three spaces": builders.sentencepiece_tokenizer(
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("▁", 3, 0)])
        ),
        "window": builders.sentencepiece_tokenizer(decoders.Metaspace()),
        "nested bytes": builders.byte_tokenizer(["é"], decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    }
