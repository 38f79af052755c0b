"""The single entry to tokenizers, whatever they are built from."""

from __future__ import annotations

from headrace.errors import ModelError
from headrace.text.directory_tokenizer import tokenizer_from_directory
from headrace.text.gguf_tokenizer import tokenizer_from_gguf
from headrace.text.source import TextSource
from headrace.text.tokenizer import Tokenizer


def load_tokenizer(source: TextSource) -> Tokenizer:
    if source.gguf_metadata is not None:
        return tokenizer_from_gguf(source.gguf_metadata)
    if source.directory is not None:
        return tokenizer_from_directory(source.directory)
    raise ModelError(
        "this model brings no tokenizer; pass token ids, or name a directory that has one with --tokenizer"
    )
