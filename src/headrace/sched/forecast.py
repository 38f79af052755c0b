"""Predicts the peak of tokens that the running sequences hold, from their limits and from finished answers."""

from __future__ import annotations

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.sched.slots import SlotTable

MIN_FINISHED = 16  # answers; fewer say nothing about the lengths of others


class Forecast:
    """Learns what share of their limits answers reach.

    An answer that cannot stop before its limit has an exact length. As long as nothing is learned, all others are
    assumed to end where they are, so that they keep no sequence from starting."""

    def __init__(self) -> None:
        self._sum_shares = 0.0
        self._num_finished = 0

    def learn(self, num_tokens: int, limit: int) -> None:
        self._sum_shares += num_tokens / limit
        self._num_finished += 1

    @property
    def share(self) -> float | None:
        """Mean share of its limit that an answer reaches; None until enough have finished."""
        return self._sum_shares / self._num_finished if self._num_finished >= MIN_FINISHED else None

    def peak_tokens(self, slots: SlotTable, candidate: Sequence, *, num_held: int) -> int:
        """The largest number of tokens held at once, if no sequence but `candidate` starts.

        All running sequences grow by one token a step. When the k-th of them ends, those after it have grown as much as
        it has, and what the earlier ones held is free.
        """
        running = np.flatnonzero(slots.total)
        lens = np.append(slots.total[running], len(candidate.token_ids))
        ends = np.append(slots.end[running], candidate.end_len)
        prompts = np.append(slots.prompt_len[running], candidate.prompt_len)
        has_exact_length = np.append(slots.has_exact_length[running], candidate.has_exact_length)
        share = self.share
        learned = lens if share is None else (prompts + share * (ends - prompts)).astype(np.int64)
        remaining = np.maximum(np.where(has_exact_length, ends, learned) - lens, 0)
        order = np.argsort(remaining, kind="stable")
        own = (lens - np.append(slots.cached[running], 0))[order]
        freed = np.cumsum(own) - own
        num_left = len(order) - np.arange(len(order))
        return num_held + int((remaining[order] * num_left - freed).max())
