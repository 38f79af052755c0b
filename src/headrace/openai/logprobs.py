"""Log-probabilities in the three shapes that clients read: chat, completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headrace.text import Tokenizer
from headrace.types import PromptLogprobs, TokenLogprobs

MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have
_PART = re.compile(r"bytes:(\\x[0-9a-f]{2})+")  # the name of a token that is part of a character


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Part of a character becomes a replacement mark; `bytes` of a chat entry has it in full."""
    return str(token_id) if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_name(token_id: int, tokenizer: Tokenizer | None) -> str:
    """The text, or `bytes:\\xe2\\x82` for part of a character, as OpenAI names it in the lists of completions: there
    the name is a key, and all replacement marks are equal."""
    if tokenizer is None:
        return str(token_id)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def len_in_text(name: str) -> int:
    """How many characters a token counts for in `text_offset`: part of a character is a replacement mark there."""
    if not _PART.fullmatch(name):
        return len(name)
    return len(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")).decode("utf-8", "replace"))


# Chat: one object for each generated token.


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"content": chat_entries(entries, tokenizer), "refusal": None}


def chat_entries(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """`top_logprobs` has exactly as many as were asked for: the chosen token is not added, as in OpenAI's API."""
    return [
        {
            **_chat_entry(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _chat_entry(token_id, logprob, tokenizer)
                for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "token": token_text(token_id, tokenizer),
        "logprob": max(MIN_LOGPROB, logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


# Completions: four lists with one item for each token.


def completion_lists(
    entries: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer | None,
    *,
    first_token: int | None = None,
    offset: int = 0,
) -> dict[str, Any]:
    """`first_token`: the first of an echoed prompt, whose entry is None. `offset`: where the first token starts."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    most_likely: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token_id = entry.token_id if entry is not None else first_token
        name = "" if token_id is None else token_name(token_id, tokenizer)
        tokens.append(name)
        offsets.append(offset)
        offset += len_in_text(name)
        chosen.append(None if entry is None else max(MIN_LOGPROB, entry.logprob))
        most_likely.append(None if entry is None else _most_likely(entry, tokenizer))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": most_likely, "text_offset": offsets}


def _most_likely(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    """The k most likely tokens, and the chosen one if it is not among them: k or k + 1 entries, as in OpenAI's API.
    Keys are names; of two tokens with the same text the more likely one is kept."""
    found: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        found.setdefault(token_name(token_id, tokenizer), max(MIN_LOGPROB, logprob))
    found.setdefault(token_name(entry.token_id, tokenizer), max(MIN_LOGPROB, entry.logprob))
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
