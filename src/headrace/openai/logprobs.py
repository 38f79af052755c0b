"""Log-probabilities in the three shapes that clients read: chat, completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headrace.text import Tokenizer
from headrace.types import PromptLogprobs, TokenLogprobs

MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have


ID_PREFIX = "token_id:"  # vLLM's, of tokens that are named by their ids


def token_text(token_id: int, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> str:
    """Part of a character becomes a replacement mark; `bytes` of a chat entry has it in full. `as_ids`: the token is
    named by its id, as vLLM's `return_tokens_as_token_ids` asks."""
    if as_ids:
        return f"{ID_PREFIX}{token_id}"
    return str(token_id) if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_name(token_id: int, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> str:
    """The text, or `bytes:\\xe2\\x82` for part of a character, as OpenAI names it in the lists of completions: there
    the name is a key, and all replacement marks are equal."""
    if as_ids:
        return f"{ID_PREFIX}{token_id}"
    if tokenizer is None:
        return str(token_id)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# Chat: one object for each generated token.


def chat_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> dict[str, Any]:
    return {"content": chat_entries(entries, tokenizer, as_ids=as_ids), "refusal": None}


def chat_entries(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """`top_logprobs` has exactly as many as were asked for: the chosen token is not added, as in OpenAI's API."""
    return [
        {
            **_chat_entry(entry.token_id, entry.logprob, tokenizer, as_ids=as_ids),
            "top_logprobs": [
                _chat_entry(token_id, logprob, tokenizer, as_ids=as_ids)
                for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer | None, *, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_text(token_id, tokenizer, as_ids=as_ids),
        "logprob": max(MIN_LOGPROB, logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


# Completions: four lists with one item for each token.


def entries_of_text(
    entries: Sequence[TokenLogprobs], text: str, tokenizer: Tokenizer | None
) -> Sequence[TokenLogprobs]:
    """The entries of the tokens that spell `text`, which ends what all of them spell. Tokens that are not shown, such
    as the one that ends an answer, have none."""
    if tokenizer is None:
        return entries
    left, found = text.encode("utf-8", "surrogatepass"), []
    for entry in reversed(entries):
        if not left:
            break
        piece = tokenizer.token_bytes(entry.token_id)
        if left.endswith(piece) or piece.endswith(left):
            found.append(entry)
            left = left[: max(0, len(left) - len(piece))]
    return found[::-1]


class TextOffsets:
    """Where each token starts in the text of a choice.

    A token that continues a character starts where the character does. A special token that the text does not show
    takes no room. An echoed `prompt` has `num_prompt_tokens`; the answer follows it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        skip_special_tokens: bool = True,
        prompt: str = "",
        num_prompt_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._prompt = prompt
        self._num_prompt_left = num_prompt_tokens
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        start = self._position + self._num_marks_before(token_id)
        if not self._num_prompt_left:
            self._position += self._answer_len(token_id)
            return start
        self._num_prompt_left -= 1
        self._position = self._position + self._prompt_len(token_id) if self._num_prompt_left else len(self._prompt)
        return start

    def _num_marks_before(self, token_id: int) -> int:
        """Replacement marks of a character that ended early: the token does not continue it."""
        unfinished = self._decoder.getstate()[0]
        if not unfinished or self._tokenizer is None:
            return 0
        continues = self._tokenizer.token_bytes(token_id)[:1]
        return 0 if b"\x80" <= continues <= b"\xbf" else len(unfinished.decode("utf-8", "replace"))

    def _answer_len(self, token_id: int) -> int:
        if self._tokenizer is not None and self._skips_special and token_id in self._tokenizer.special_ids:
            return 0
        return len(self._new_text(token_id))

    def _prompt_len(self, token_id: int) -> int:
        text = self._new_text(token_id)
        if self._tokenizer is not None and token_id in self._tokenizer.special_ids:  # such as a BOS that was added
            return len(text) if self._prompt.startswith(text, self._position) else 0
        is_added_space = not self._position and text.startswith(" ") and not self._prompt.startswith(" ")
        return len(text) - is_added_space

    def _new_text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


def completion_lists(
    entries: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer | None,
    *,
    first_token: int | None = None,
    offsets: TextOffsets | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """`first_token`: the first of an echoed prompt, whose entry is None. `offsets`: those of a text that began before
    these tokens."""
    offsets = offsets or TextOffsets(tokenizer)
    tokens: list[str] = []
    chosen: list[float | None] = []
    most_likely: list[dict[str, float] | None] = []
    starts: list[int] = []
    for entry in entries:
        token_id = entry.token_id if entry is not None else first_token
        tokens.append("" if token_id is None else token_name(token_id, tokenizer, as_ids=as_ids))
        starts.append(0 if token_id is None else offsets.take(token_id))
        chosen.append(None if entry is None else max(MIN_LOGPROB, entry.logprob))
        most_likely.append(None if entry is None else _most_likely(entry, tokenizer, as_ids=as_ids))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": most_likely, "text_offset": starts}


def _most_likely(entry: TokenLogprobs, tokenizer: Tokenizer | None, *, as_ids: bool) -> dict[str, float]:
    """The chosen token, then the k most likely: k or k + 1 entries, as in OpenAI's API, in vLLM's order. Keys are
    names; of two tokens with the same text the more likely one is kept."""
    found = {token_name(entry.token_id, tokenizer, as_ids=as_ids): max(MIN_LOGPROB, entry.logprob)}
    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        name = token_name(token_id, tokenizer, as_ids=as_ids)
        found[name] = max(found.get(name, MIN_LOGPROB), logprob)
    return found


# vLLM's prompt_logprobs: an object for each prompt token, null for the first.


def prompt_entries(entries: PromptLogprobs, tokenizer: Tokenizer | None) -> list[dict[str, Any] | None]:
    """Keys are token ids; values have the log-probability, the rank and the text."""
    return [None if entry is None else _prompt_entry(entry, tokenizer) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    found = {str(token): _ranked(token, logprob, rank, tokenizer) for rank, (token, logprob) in enumerate(pairs, 1)}
    found[str(entry.token_id)] = _ranked(entry.token_id, entry.logprob, entry.rank, tokenizer)
    return found


def _ranked(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"logprob": max(MIN_LOGPROB, logprob), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}
