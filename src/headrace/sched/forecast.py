"""Whether all that runs will fit into the cache to its end, by what requests say and what others did."""

from __future__ import annotations

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.sched.slots import SlotTable

LEAST_FINISHED = 16  # answers, before their lengths say anything about others


class Forecast:
    """Learns what share of their limits answers reach. An answer that cannot stop before its limit needs no learning;
    one of which nothing is known is taken to end where it stands, so that it holds nobody back."""

    def __init__(self) -> None:
        self._sum_shares = 0.0
        self._num_finished = 0

    def learn(self, num_tokens: int, limit: int) -> None:
        self._sum_shares += num_tokens / limit
        self._num_finished += 1

    @property
    def share(self) -> float | None:
        """Of its limit that an answer reaches on average, if that is known."""
        return self._sum_shares / self._num_finished if self._num_finished >= LEAST_FINISHED else None

    def peak_tokens(self, slots: SlotTable, newcomer: Sequence, *, num_held: int) -> int:
        """The most tokens that will be held at once, if none but `newcomer` joins.

        All running sequences grow by a token a step. Until the k-th of them ends, those after it have grown as much as
        it has, and what the earlier ones held is free.
        """
        running = np.flatnonzero(slots.total)
        lens = np.append(slots.total[running], len(newcomer.token_ids))
        ends = np.append(slots.end[running], newcomer.end_len)
        prompts = np.append(slots.prompt_len[running], newcomer.prompt_len)
        is_exact = np.append(slots.is_exact[running], newcomer.is_exact)
        share = self.share
        learned = lens if share is None else (prompts + share * (ends - prompts)).astype(np.int64)
        remaining = np.maximum(np.where(is_exact, ends, learned) - lens, 0)
        order = np.argsort(remaining, kind="stable")
        own = (lens - np.append(slots.cached[running], 0))[order]
        freed = np.cumsum(own) - own
        num_left = len(order) - np.arange(len(order))
        return num_held + int((remaining[order] * num_left - freed).max())
