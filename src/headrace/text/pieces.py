"""What each token adds to the text, for the decoders whose tokens can be decoded one by one.

    byte-level      a token is bytes; the text is all bytes, read as UTF-8
    sentencepiece   a token is text, or one byte of a run that is read as UTF-8 when the run ends

Tables are filled as tokens occur, so that a large vocabulary costs nothing at start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

# u8::from_str_radix, which the Rust decoder uses, takes a plus sign too.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


def _byte_of_character() -> dict[str, int]:
    """Returns the byte-level alphabet: printable Latin-1 is itself, the other bytes are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


@dataclass(frozen=True, slots=True)
class ByteLevelRule:
    """Every token is bytes."""


@dataclass(frozen=True, slots=True)
class SentencePieceRule:
    """Text is replaced within tokens, byte tokens are joined, and up to a number of leading spaces are removed."""

    replacements: tuple[tuple[str, str], ...]
    has_byte_fallback: bool
    strip_character: str
    strip_left: int


def read_rule(backend: Backend) -> ByteLevelRule | SentencePieceRule | None:
    """Returns how this tokenizer decodes, or None if its tokens cannot be decoded one by one."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelRule()
    return _sentencepiece_rule(steps)


def _sentencepiece_rule(steps: list[dict[str, Any]]) -> SentencePieceRule | None:
    """Accepts Replace*, ByteFallback?, Fuse?, Strip? in this order; Strip only on the fused text."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in rest]
    has_byte_fallback = kinds[:1] == ["ByteFallback"]
    strips = kinds[int(has_byte_fallback) :]
    if strips in ([], ["Fuse"]):
        return SentencePieceRule(tuple(replacements), has_byte_fallback, " ", 0)
    if strips == ["Fuse", "Strip"] and rest[-1]["stop"] == 0:
        return SentencePieceRule(tuple(replacements), has_byte_fallback, rest[-1]["content"], rest[-1]["start"])
    return None


class BytePieces(dict[int, bytes]):
    """Token id -> its bytes; nothing for skipped and unknown tokens."""

    def __init__(self, backend: Backend, skipped: Set[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            piece = bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token outside the alphabet is plain text
            piece = token.encode("utf-8")
        self[token_id] = piece
        return piece


class TextPieces(dict[int, str | int | None]):
    """Token id -> its text, or its byte as a number; None for skipped and unknown tokens."""

    def __init__(self, backend: Backend, skipped: Set[int], rule: SentencePieceRule) -> None:
        super().__init__(dict.fromkeys(skipped))
        self.rule = rule
        self._backend = backend

    def __missing__(self, token_id: int) -> str | int | None:
        token = self._backend.id_to_token(token_id)
        piece = None if token is None else self._piece(token)
        self[token_id] = piece
        return piece

    def _piece(self, token: str) -> str | int:
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self.rule.has_byte_fallback else None
        return token if byte is None else int(byte[1], 16)


Pieces = BytePieces | TextPieces


def read_pieces(backend: Backend, skipped: Set[int]) -> Pieces | None:
    """Returns the table of a tokenizer's pieces without the skipped tokens, or None if there can be none."""
    match read_rule(backend):
        case ByteLevelRule():
            return BytePieces(backend, skipped)
        case SentencePieceRule() as rule:
            return TextPieces(backend, skipped, rule)
        case _:
            return None
