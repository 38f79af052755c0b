"""Small tokenizers of each kind, built here so that no test needs a file."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.text import Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_tokenizer(
    texts: Sequence[str] = (), decoder: decoders.Decoder | None = None, special: Sequence[str] = ()
) -> Tokenizer:
    """Ids 0..255 are the bytes, then </s> and <s>, then a token for each text; no merges, so text gives bytes.

    `special` adds special tokens at the end.
    """
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    words = ["".join(spelled[byte] for byte in text.encode()) for text in texts]
    tokens = [*(spelled[byte] for byte in range(256)), "</s>", "<s>", *words]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("</s>", "<s>", *special)]
    )
    return Tokenizer(backend, special_tokens=SPECIAL_TOKENS)


def sentencepiece_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Ids 0..2 are special, 3..258 the bytes, then pieces with and without a leading space."""
    pieces = ["▁", "▁▁", "▁the", "a", "é", "日", "▁a", "b▁c", "�", "<0x>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return Tokenizer(backend, special_tokens=SPECIAL_TOKENS)


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def gemma_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
