"""Incremental detokenization: never half a character, and all pieces together are what decode() returns.

    byte-level      bytes wait until they form a character
    sentencepiece   byte tokens wait for a token that is not one, since decode() reads a run of them as a whole
    others          a few tokens are decoded twice, with and without the new ones; the difference is the new text

The work per token does not grow with the text.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import numpy as np

from headrace.text.pieces import BytePieces, TextPieces
from headrace.text.tokenizer import Ids, Tokenizer

_NUM_CONTEXT = 8  # tokens before the new ones that a decoder may need
_MAX_WAITING = 16  # tokens that may wait for the rest of a character
_HALF = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one answer.

    `prompt_tail_ids`, a few of the prompt's last tokens, make the answer continue where the prompt ended: a first word
    keeps its space, and a character that the prompt started is completed. Without them the text is decode(answer).
    """

    __slots__ = ("_stream",)

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: Ids = (), skip_special_tokens: bool = True) -> None:
        self._stream = _open_stream(tokenizer, skip_special_tokens)
        self._stream.follow(_as_list(prompt_tail_ids))

    def push(self, token_ids: Ids) -> str:
        """Returns the text that these tokens complete."""
        return self._stream.push(token_ids if type(token_ids) is list else _as_list(token_ids))

    def flush(self) -> str:
        """Returns what was still incomplete when the answer ended."""
        return self._stream.flush()


def whole_text(tokenizer: Tokenizer, prompt_ids: Ids, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """Returns the text that a `Detokenizer` gives for a whole answer."""
    pieces = tokenizer.pieces(skip_special_tokens)
    if isinstance(pieces, BytePieces) and len(prompt_ids):
        last = pieces[int(prompt_ids[-1])]
        if last and last[-1] < 0x80:  # as in most prompts, no character is incomplete
            return b"".join(map(pieces.__getitem__, token_ids)).decode("utf-8", "replace")
    detokenizer = Detokenizer(tokenizer, prompt_ids[-_NUM_CONTEXT:], skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.flush()


class _Stream(Protocol):
    def follow(self, token_ids: list[int]) -> None: ...
    def push(self, token_ids: list[int]) -> str: ...
    def flush(self) -> str: ...


def _open_stream(tokenizer: Tokenizer, skip_special_tokens: bool) -> _Stream:
    pieces = tokenizer.pieces(skip_special_tokens)
    if isinstance(pieces, BytePieces):
        return _ByteStream(pieces)
    if isinstance(pieces, TextPieces):
        return _TextStream(pieces)
    return _WindowStream(tokenizer, skip_special_tokens)


class _ByteStream:
    __slots__ = ("_pieces", "_waiting")

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._waiting = b""

    def follow(self, token_ids: list[int]) -> None:
        last = self._pieces[token_ids[-1]] if token_ids else b""
        if not last or last[-1] >= 0x80:  # else no character is incomplete
            self.push(token_ids)

    def push(self, token_ids: list[int]) -> str:
        data = self._waiting + b"".join(map(self._pieces.__getitem__, token_ids))
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._waiting = data[num_used:]
        return text

    def flush(self) -> str:
        if not self._waiting:
            return ""
        data, self._waiting = self._waiting, b""
        return data.decode("utf-8", "replace")


class _TextStream:
    __slots__ = ("_num_to_strip", "_pieces", "_run")

    def __init__(self, pieces: TextPieces) -> None:
        self._pieces = pieces
        self._run = bytearray()  # of byte tokens
        self._num_to_strip = pieces.rule.strip_left

    def follow(self, token_ids: list[int]) -> None:
        text = self.push(token_ids)
        if text or self._run:
            self._num_to_strip = 0
        # Characters that the prompt completed belong to the prompt.
        del self._run[: codecs.utf_8_decode(self._run, "replace", False)[1]]

    def push(self, token_ids: list[int]) -> str:
        parts: list[str] = []
        for piece in map(self._pieces.__getitem__, token_ids):
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece)
        return self._strip("".join(parts))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        """Decodes a run of byte tokens. As in the decoder, one wrong byte makes the whole run unreadable."""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _HALF * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if not self._num_to_strip or not text:
            return text
        stripped = text.lstrip(self._pieces.rule.strip_character)
        num_stripped = min(len(text) - len(stripped), self._num_to_strip)
        self._num_to_strip = 0 if num_stripped < len(text) else self._num_to_strip - num_stripped
        return text[num_stripped:]


class _WindowStream:
    __slots__ = ("_context", "_context_text", "_skip_special_tokens", "_tokenizer", "_waiting")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._waiting: list[int] = []
        self._move_to([])

    def follow(self, token_ids: list[int]) -> None:
        self._move_to(token_ids)

    def push(self, token_ids: list[int]) -> str:
        self._waiting += token_ids
        text = self._decode(self._context + self._waiting)
        if text.endswith(_HALF) and len(self._waiting) < _MAX_WAITING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._waiting))

    def _emit(self, text: str) -> str:
        new_text = text[len(self._context_text) :]
        self._move_to(self._context + self._waiting)
        self._waiting = []
        return new_text

    def _move_to(self, token_ids: list[int]) -> None:
        self._context = token_ids[-_NUM_CONTEXT:]
        self._context_text = self._decode(self._context).rstrip(_HALF)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


def _as_list(token_ids: Ids) -> list[int]:
    if isinstance(token_ids, np.ndarray):
        ids: list[int] = token_ids.tolist()
        return ids
    return token_ids if isinstance(token_ids, list) else list(token_ids)
