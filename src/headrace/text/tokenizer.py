"""Text to token ids and back, around the Rust `tokenizers` library.

A model's vocabulary may be larger than its tokenizer's: ids that the tokenizer does not know add nothing to the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from headrace.errors import ModelError, RequestError
from headrace.text.pieces import BytePieces, Pieces, TextPieces, read_pieces
from headrace.text.template import ChatTemplate

Ids = Sequence[int] | npt.NDArray[np.integer]

_MAX_TOKEN_ID = 2**32 - 1


class PairIds(NamedTuple):
    token_ids: list[int]
    second_start: int | None  # the first token of type 1; None: the tokenizer gives all the same type


class Tokenizer:
    """A tokenizer, immutable once built, so any thread may use it. Encoding releases the GIL."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        has_token_types: bool = True,
    ) -> None:
        """`special_tokens` maps 'bos_token', 'eos_token' and the like to their text. `eos_token_ids`: further end
        tokens. `has_token_types`: the model is told the two texts of a pair apart, where the tokenizer does."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.has_token_types = has_token_types
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.vocab_size = vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        ends = [self.eos_token_id, *eos_token_ids]
        self.eos_token_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        self._pieces = {False: read_pieces(backend, frozenset()), True: read_pieces(backend, self.special_ids)}

    @classmethod
    def of_serialized(cls, backend: str, **others: Any) -> Tokenizer:
        """Rebuilds a tokenizer from what `serialized` returned and the other arguments of the constructor."""
        return cls(Backend.from_str(backend), **others)

    def with_chat_template(self, template: ChatTemplate) -> Tokenizer:
        """Returns the same tokenizer with another chat template."""
        changed = copy(self)
        changed.chat_template = template
        return changed

    def serialized(self) -> str:
        """Returns the Rust tokenizer as text. Raises ValueError if a part of it is written in Python."""
        try:
            return self._backend.to_str()
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"the tokenizer cannot be sent to another process: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. `add_special_tokens`: adds what the tokenizer puts around a prompt; use False for a
        rendered chat template."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            # The batch call even for one text: only it releases the GIL.
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _refused_text(texts) from error
        return [encoding.ids for encoding in encodings]

    def encode_truncated(self, text: str, max_len: int, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes the start of a text, so that at most `max_len` tokens remain, special tokens included."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        num_special = self._backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        encoding.truncate(max(0, max_len - num_special))
        return self._backend.post_process(encoding, None, add_special_tokens).ids

    def encode_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], *, max_len: int | None = None
    ) -> list[PairIds]:
        """Encodes pairs of texts as one prompt each, with the special tokens between and around them. One first text
        is paired with all second ones. With `max_len`, the longer text of a pair is truncated first."""
        heads, tails = (
            self._backend.encode_batch(list(texts), add_special_tokens=False) for texts in (firsts, seconds)
        )
        num_special = self._backend.num_special_tokens_to_add(is_pair=True)
        pairs = []
        for index, tail in enumerate(tails):
            place = index if len(heads) > 1 else 0
            encodings = [heads[place], tail]
            if max_len is not None and sum(len(each.ids) for each in encodings) > max_len - num_special:
                encodings = self._truncated(firsts[place], seconds[index], max_len - num_special)
            whole = self._backend.post_process(encodings[0], encodings[1], add_special_tokens=True)
            has_second = self.has_token_types and 1 in whole.type_ids
            pairs.append(PairIds(whole.ids, whole.type_ids.index(1) if has_second else None))
        return pairs

    def _truncated(self, first: str, second: str, room: int) -> list[Encoding]:
        encodings = [self._backend.encode(text, add_special_tokens=False) for text in (first, second)]
        lens = [len(encoding.ids) for encoding in encodings]
        for encoding, kept in zip(encodings, _fair_lens(lens, max(0, room)), strict=True):
            encoding.truncate(kept)
        return encodings

    def decode(self, token_ids: Ids, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(_known_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(self, token_ids: Sequence[Ids], skip_special_tokens: bool = True) -> list[str]:
        known = [_known_ids(ids) for ids in token_ids]
        return self._backend.decode_batch(known, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Returns the token as its vocabulary spells it ('Ġthe', '▁the', '<0x0A>'); empty if it is unknown."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id <= _MAX_TOKEN_ID else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text; a token may be half a character."""
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            return b""
        match self._pieces[False]:
            case BytePieces() as pieces:
                return pieces[token_id]
            case TextPieces() as pieces:
                piece = pieces[token_id]
                return bytes([piece]) if isinstance(piece, int) else (piece or "").encode("utf-8")
            case _:
                return self.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def pieces(self, skip_special_tokens: bool) -> Pieces | None:
        """Returns the table for incremental decoding, or None if tokens cannot be decoded one by one."""
        return self._pieces[skip_special_tokens]

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def single_id(self, text: str) -> int | None:
        """Returns the id of the token that is exactly this text, special or not."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id is not None and self.token_bytes(token_id) == text.encode() else None

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _fair_lens(lens: list[int], room: int) -> list[int]:
    """Returns how much of two texts is kept: the longer one is shortened first, down to the other."""
    shorter = min(*lens, room // 2)
    return [shorter, room - shorter] if lens[0] <= lens[1] else [room - shorter, shorter]


def wrap_prompts(backend: Backend, *, bos_token: str | None, eos_token: str | None) -> None:
    """Makes the tokenizer add these tokens before and after each prompt, when special tokens are asked for."""
    named = {"BOS": bos_token, "EOS": eos_token}
    used = {name: token for name, token in named.items() if token is not None}
    if not used:
        return
    if missing := [token for token in used.values() if backend.token_to_id(token) is None]:
        raise ModelError(f"the tokenizer is told to add {missing[0]!r} to prompts, but has no such token")
    order = [name for name in ("BOS", "$A", "EOS") if name == "$A" or name in used]
    tokens = [{"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]} for name, text in used.items()]
    backend.post_processor = TemplateProcessing(single=order, special_tokens=tokens)


def mark_special(backend: Backend, tokens: Sequence[str]) -> None:
    """Marks tokens of the vocabulary that are found in text and that `skip_special_tokens` skips."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [token for token in dict.fromkeys(tokens) if token not in known and backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])


def _known_ids(token_ids: Ids) -> list[int]:
    ids: list[int] = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
    if ids and (min(ids) < 0 or max(ids) > _MAX_TOKEN_ID):
        return [token_id for token_id in ids if 0 <= token_id <= _MAX_TOKEN_ID]
    return ids


def _refused_text(texts: Sequence[object]) -> RequestError:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return RequestError(f"prompt {index} must be text, got {type(text).__name__}", param="prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            return RequestError(
                f"prompt {index} is not valid Unicode: a lone surrogate U+{code:04X} at character {error.start:,}; "
                "remove it or write the whole character",
                param="prompt",
            )
    return RequestError("the prompts cannot be tokenized: they must be a list of text", param="prompt")
