"""Reads the blocks of waiting prompts from the disk before they start, unless the device computes them earlier.

    disk      ├── reads that were asked for before ──┼── blocks of the prompt ──┤
    device    ├── work before the prompt ──┼── the same blocks, computed ──┤
                                                                            ▲ here the device would be done with them

A prompt's blocks are read, and it waits for them, only if the upper line ends first. So each prompt is ready no later
than without a disk, as far as the two rates are known; all that the disk brings meanwhile leaves time for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.kv import BlockTables, Fetch
from headrace.sched.compute_rate import ComputeRate
from headrace.sched.placement import Placement
from headrace.sched.sequence import Sequence

LOOK_AHEAD = 16  # sequences near the head of the queue whose blocks are read
MAX_TRUST_S = 2.0  # that sequences wait in all before it is known how fast the device and the disk are
MIN_GAIN = 0.2  # of the time to compute blocks: reads that gain less cost more, in smaller steps and by errors
NUM_SAMPLE_BLOCKS = 8  # read to learn how fast the disk is now; nobody waits for them


class Fetching:
    """Starts reads, and says who has to wait for them. A sequence is fetched once, when it comes near the head of the
    queue; after a preemption its blocks are in the host tier or are computed again."""

    def __init__(
        self,
        tables: BlockTables,
        placement: Placement,
        clock: Callable[[], float],
        *,
        max_step_tokens: int,
    ) -> None:
        assert tables.tiers is not None
        self.compute_rate = ComputeRate(max_step_tokens)
        self._tables = tables
        self._tiers = tables.tiers
        self._placement = placement
        self._clock = clock
        self._trust_s = MAX_TRUST_S
        self._trusted: tuple[Sequence, float] | None = None  # who waits at an unknown rate, and when it last asked

    def look_ahead(self, waiting: Iterable[Sequence], *, num_tokens_before: int) -> None:
        """Read blocks of the first waiting sequences, in their order. `num_tokens_before`: that are computed before
        them."""
        self._tiers.poll()
        now = self._clock()
        for sequence in waiting:
            if sequence.fetch is None:
                token_s = self.compute_rate.token_s(len(sequence.token_ids))
                if self._tiers.reads.num_pending and (token_s is None or not self._has_room(sequence)):
                    return  # later; at an unknown rate one at a time
                work_s = self._work_s(num_tokens_before, token_s, now)
                sequence.fetch = self._fetch(sequence, token_s, now, work_s=work_s)
            num_tokens_before += len(sequence.token_ids) - sequence.fetch.num_found * self._tables.block_size

    def is_waiting(self, sequence: Sequence, *, num_tokens_before: int) -> bool:
        """Whether a sequence that could start waits for blocks that are still read. `num_tokens_before`: those of the
        step in planning."""
        now, token_s = self._clock(), self.compute_rate.token_s(len(sequence.token_ids))
        work_s = self._work_s(num_tokens_before, token_s, now)
        if sequence.fetch is None:
            sequence.fetch = self._fetch(sequence, token_s, now, work_s=work_s)
        fetch = sequence.fetch
        if fetch.is_over:
            return False
        read_s = self._tiers.reads.block_s(now)
        if token_s is None or read_s is None:
            return self._is_trusted(sequence, now)
        return self._tiers.num_reads_before(fetch) * read_s <= work_s + len(fetch.pending) * self._limit_s(token_s)

    def _has_room(self, sequence: Sequence) -> bool:
        return self._tables.num_blocks_for(len(sequence.token_ids)) <= self._tiers.num_to_read

    def _fetch(self, sequence: Sequence, token_s: float | None, now: float, *, work_s: float) -> Fetch:
        token_ids = self._placement.reusable_tokens(sequence)
        if token_ids is None or sequence.parent is not None:
            return Fetch()
        hit = self._tables.find_prefix(token_ids, sequence.salt)
        digests = self._tables.digests_after(hit, token_ids)
        num_blocks = self._tiers.num_on_disk(digests)
        if token_s is None:
            max_reads = num_blocks if self._trust_s > 0.0 else 0
        else:
            max_reads = self._max_reads(num_blocks, self._limit_s(token_s), now, work_s=work_s)
        fetch = self._tiers.fetch(digests, now=now, max_reads=max_reads)
        fetch.num_found += hit.num_blocks
        return fetch

    def _limit_s(self, token_s: float) -> float:
        """The longest time in which a block may be read, if the device computes a token in `token_s`."""
        return (1.0 - MIN_GAIN) * token_s * self._tables.block_size

    def _max_reads(self, num_blocks: int, limit_s: float, now: float, *, work_s: float) -> int:
        """How many of a prompt's first blocks arrive before they would be computed; at least a few if it is not known
        how fast the disk is now. `limit_s`: for a block."""
        reads = self._tiers.reads
        num_pending, read_s = reads.num_pending, reads.block_s(now)
        num_sampled = max(0, NUM_SAMPLE_BLOCKS - num_pending) if reads.is_old(now) else 0
        if read_s is None:
            return num_blocks if self._trust_s > 0.0 else num_sampled
        if (num_pending + num_blocks) * read_s <= work_s + num_blocks * limit_s:
            return num_blocks
        spare_s, loss_s = work_s - num_pending * read_s, read_s - limit_s  # before the prompt; by each block of it
        return max(num_sampled, int(spare_s / loss_s) if min(spare_s, loss_s) > 0.0 else 0)

    def _work_s(self, num_tokens: int, token_s: float | None, now: float) -> float:
        """The time until the device is done with steps in flight, and so many tokens more."""
        return 0.0 if token_s is None else self.compute_rate.in_flight_s(now) + num_tokens * token_s

    def _is_trusted(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence waits although nobody knows what is faster. What is computed meanwhile is not large enough
        to tell, so this ends."""
        before, self._trusted = self._trusted, (sequence, now)
        if before is not None and before[0] is sequence:
            self._trust_s -= now - before[1]
        return self._trust_s > 0.0
