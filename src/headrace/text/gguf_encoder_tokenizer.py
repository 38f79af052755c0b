"""Tokenizers of encoders in GGUF files: WordPiece and Unigram, and the tokens around one text or a pair.

tokenizer.ggml.model = 'bert'    WordPiece; a token that starts a word has a mark where vocab.txt has none
tokenizer.ggml.model = 't5'      SentencePiece's Unigram, with its map of characters
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from headrace.errors import ModelError

ARCHITECTURES = ("bert", "modern-bert")
KINDS = ("bert", "t5")
_WORD = "\u2581"
_FIRST = (("cls_token_id", "bos_token_id"), ("[CLS]", "<s>"))
_LAST = (("seperator_token_id", "eos_token_id"), ("[SEP]", "</s>"))  # the key is written so in files


def word_piece(tokens: Sequence[str], control: Sequence[str]) -> Backend:
    """Whether text is put into lower case is not stated: it is, unless the vocabulary has all capital letters."""
    kept = set(control)
    pieces = [token if token in kept else _as_in_vocab_txt(token) for token in tokens]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not vocab.keys() >= set(string.ascii_uppercase))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _as_in_vocab_txt(token: str) -> str:
    return token.removeprefix(_WORD) if token.startswith(_WORD) else f"##{token}"


def unigram(metadata: Mapping[str, Any], tokens: Sequence[str], unknown: str | None) -> Backend:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("this GGUF file has no score for each token; name a directory with a tokenizer.json instead")
    unknown_id = tokens.index(unknown) if unknown in tokens else None
    pairs = list(zip(tokens, map(float, scores), strict=True))
    backend = Backend(models.Unigram(vocab=pairs, unk_id=unknown_id, byte_fallback=False))
    if characters := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        backend.normalizer = normalizers.Precompiled(bytes(characters))
    words = pre_tokenizers.Metaspace(replacement=_WORD, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.decoder = decoders.Metaspace(replacement=_WORD, prepend_scheme="always")
    return backend


def wrap_pairs(backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Adds the tokens around one text, and around and between two. BERT tells the two apart by types; RoBERTa has its
    end token twice between them."""
    first, last = (_named(metadata, tokens, *names) for names in (_FIRST, _LAST))
    is_roberta = first == "<s>"
    pair = [first, "$A", last, *([last, "$B", last] if is_roberta else ["$B:1", f"{last}:1"])]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((first, last))]
    backend.post_processor = TemplateProcessing(single=[first, "$A", last], pair=pair, special_tokens=ids)


def _named(metadata: Mapping[str, Any], tokens: Sequence[str], keys: Sequence[str], texts: Sequence[str]) -> str:
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    stated = next((tokens[index] for index in ids if index is not None and 0 <= index < len(tokens)), None)
    found = stated or next((text for text in texts if text in tokens), None)
    if found is None:
        raise ModelError(f"this GGUF file's tokenizer has no token {texts[0]!r} to put around texts")
    return found
