"""What a client saw of each request. Times are seconds since the start of the run, on one clock for all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec

Status = Literal["ok", "refused", "failed", "timeout"]
STATUSES: tuple[str, ...] = get_args(Status)


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request.

    `due_s` is when the load wanted to send it: with an open loop, latency counts from there, so that a client that
    falls behind does not hide it. `chunk_s` are the arrival times of chunks with text; a chunk may carry several
    tokens, so `num_output_tokens` comes from the server's usage where it sends one.
    """

    index: int  # of the workload's request
    due_s: float
    sent_s: float
    end_s: float  # last chunk, or when the request was given up
    status: Status = "ok"
    first_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None  # of the prompt, if the server says so
    chunk_s: list[float] = []
    http_status: int | None = None
    error: str | None = None  # one line

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def ttft_s(self) -> float:
        """Time to first token, from when the request was due."""
        return (self.end_s if self.first_s is None else self.first_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        if self.first_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> Sequence[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def answered(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.is_ok]
