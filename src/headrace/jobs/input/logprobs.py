"""Log-probabilities in the two shapes that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.text import Tokenizer
from headrace.types import TokenLogprobs

LEAST = -9999.0  # what OpenAI writes for "almost never": JSON has no infinity


def chat_entries(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One object for each generated token, the most likely ones within it."""
    return [
        {
            **_entry(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _entry(token_id, logprob, tokenizer)
                for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def completion_lists(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Four lists in step with the generated tokens."""
    tokens = [_text(entry.token_id, tokenizer) for entry in entries]
    offsets, length = [], 0
    for token in tokens:
        offsets.append(length)
        length += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(LEAST, entry.logprob) for entry in entries],
        "top_logprobs": [
            {
                _text(token_id, tokenizer): max(LEAST, logprob)
                for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            }
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "token": _text(token_id, tokenizer),
        "logprob": max(LEAST, logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Half a character shows as a replacement mark here; `bytes` has it whole."""
    return str(token_id) if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")
