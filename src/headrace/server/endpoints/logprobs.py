"""Log-probabilities in the shapes of /v1/completions: four lists in step with the tokens; vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.jobs.input.logprobs import LEAST
from headrace.text import Tokenizer
from headrace.types import PromptLogprobs, TokenLogprobs


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Half a character shows as a replacement mark."""
    return str(token_id) if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def completion_lists(
    entries: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer | None,
    *,
    first_token: int | None = None,
    offset: int = 0,
) -> dict[str, Any]:
    """`first_token`: a prompt's, which nothing comes before, with the entry None. `offset`: where the first stands."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    likely: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token_id = entry.token_id if entry is not None else first_token
        text = "" if token_id is None else token_text(token_id, tokenizer)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        chosen.append(None if entry is None else max(LEAST, entry.logprob))
        likely.append(None if entry is None else _likely(entry, tokenizer))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": likely, "text_offset": offsets}


def _likely(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    """By text, the likelier first where two tokens look alike; the chosen token is always there, as OpenAI has it."""
    found: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        found.setdefault(token_text(token_id, tokenizer), max(LEAST, logprob))
    found.setdefault(token_text(entry.token_id, tokenizer), max(LEAST, entry.logprob))
    return found


def prompt_entries(entries: PromptLogprobs, tokenizer: Tokenizer | None) -> list[dict[str, Any] | None]:
    """vLLM's: for each token of the prompt but the first, token ids to log-probability, rank and text."""
    return [None if entry is None else _prompt_entry(entry, tokenizer) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    found = {str(token): _ranked(token, logprob, rank, tokenizer) for rank, (token, logprob) in enumerate(pairs, 1)}
    found[str(entry.token_id)] = _ranked(entry.token_id, entry.logprob, entry.rank, tokenizer)
    return found


def _ranked(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"logprob": max(LEAST, logprob), "rank": rank, "decoded_token": token_text(token_id, tokenizer)}
