"""Reads the blocks of waiting prompts from the disk before they start."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.kv import BlockTables, Fetch
from headrace.sched.placement import Placement
from headrace.sched.sequence import Sequence

LOOK_AHEAD = 16  # sequences near the head of the queue whose blocks are read
MAX_WAIT_S = 2.0  # a sequence whose blocks have not arrived by then computes them: the disk hangs, or is very slow


class Fetching:
    """Starts reads, and says who has to wait for them. A sequence is fetched once, when it comes near the head of the
    queue; after a preemption its blocks are in the host tier or are computed again."""

    def __init__(self, tables: BlockTables, placement: Placement, clock: Callable[[], float]) -> None:
        assert tables.tiers is not None
        self._tables = tables
        self._tiers = tables.tiers
        self._placement = placement
        self._clock = clock

    def look_ahead(self, waiting: Iterable[Sequence]) -> None:
        self._tiers.poll()
        for sequence in waiting:
            if sequence.fetch is None:
                sequence.fetch = self._fetch(sequence)

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether blocks of a sequence are still being read."""
        if sequence.fetch is None:
            sequence.fetch = self._fetch(sequence)
        return not sequence.fetch.is_over(self._clock())

    def _fetch(self, sequence: Sequence) -> Fetch:
        deadline, token_ids = self._clock() + MAX_WAIT_S, self._placement.reusable_tokens(sequence)
        if token_ids is None or sequence.parent is not None:
            return Fetch(deadline)
        hit = self._tables.find_prefix(token_ids, sequence.salt)
        return self._tables.fetch(hit, token_ids, deadline=deadline)
