"""Where a model's reasoning ends and the grammar of its answer starts, found in its tokens.

may start ── the start token ──▶ inside ── an end text is complete ──▶ after
    └─────── any other token ────────────────────────────────────────▶┘

Reasoning of limited length is ended: once it has all of its tokens, those of the end text are the only ones allowed.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.types import ReasoningSpan


class ReasoningGate:
    """The reasoning of one sequence. Owned by its constraint."""

    def __init__(
        self, span: ReasoningSpan, token_bytes: Callable[[int], bytes], tokens_of: Callable[[bytes], list[int]]
    ) -> None:
        self._ends = tuple(text.encode() for text in span.end_texts)
        self._num_kept = max(map(len, self._ends)) - 1  # bytes that may be the start of an end text
        self._max_tokens, self._end_token_ids = span.max_tokens, span.end_token_ids
        self._num_tokens = 0  # of the reasoning, without the start token
        self._token_bytes = token_bytes
        self._tokens_of = tokens_of
        self._tail = b""
        self.start_token_id = span.start_token_id  # allowed beside the grammar; None once something was read
        self.is_inside = span.start_token_id is None

    @property
    def is_after(self) -> bool:
        return not self.is_inside and self.start_token_id is None

    @property
    def forced_token_id(self) -> int | None:
        """The token that must come next, if the reasoning has as many as it may have."""
        if not self.is_inside or self._max_tokens is None or self._num_tokens < self._max_tokens:
            return None
        place = self._num_tokens - self._max_tokens
        return self._end_token_ids[place] if place < len(self._end_token_ids) else None

    def read(self, tokens: list[int]) -> list[int]:
        """Takes tokens of the answer; returns those that the grammar reads."""
        for place, token in enumerate(tokens):
            if not self._takes(token):
                return tokens[place:]
            if not self.is_inside:
                return self._after_end() + tokens[place + 1 :]
        return []

    def _takes(self, token: int) -> bool:
        """Tells whether a token belongs to the reasoning."""
        is_start = token == self.start_token_id
        if self.start_token_id is not None:
            self.is_inside = is_start
            self.start_token_id = None
        if not self.is_inside:
            return False
        self._num_tokens += not is_start
        text = self._tail + self._token_bytes(token)
        found = [place + len(end) for end in self._ends if (place := text.find(end)) >= 0]
        self.is_inside = not found
        self._tail = text[min(found) :] if found else text[max(0, len(text) - self._num_kept) :]
        return True

    def _after_end(self) -> list[int]:
        """Returns tokens of the text that shares a token with the end of the reasoning, without white space."""
        rest, self._tail = self._tail.lstrip(), b""
        return self._tokens_of(rest) if rest else []
