"""Continuous batching over lengths alone: which steps a workload takes, and how large they are.

A copy of the scheduler's policy without sequences, blocks or tokens. Nothing here depends on time, so the steps of all
devices with the same limits are the same. Steps between two events (a start, or enough ends to allow one) are computed
as arrays:

    remaining   3  7  7  9     sequences, sorted by the decode steps that they still need
    step 0..2   4 decode       3..6   3 decode       7, 8   1 decodes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.plan.workload import IntArray, Workload

FloatArray = NDArray[np.float64]

OVERCOMMIT = 0.03  # as sched/placement.py: share of the cache that forecasts may exceed
WATERMARK = 0.01  # as sched/capacity.py: share that starting sequences leave free


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds a step and the sequences that run."""

    max_num_seqs: int
    max_num_batched_tokens: int
    cache_tokens: int
    block_size: int = 16
    min_free_slots_to_start: int = 1
    full_step_tokens: int = 1 << 30
    full_rate_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """One row per step. Token counts are of all layers together: the same for each."""

    decode_seqs: IntArray
    prefill_tokens: IntArray
    prompts: IntArray  # prompts with tokens in the step
    sampled: IntArray  # sequences that sample a token
    context_tokens: FloatArray  # read by decoding sequences; a prefix that several share counts once
    pairs: FloatArray  # query-key pairs of prefill attention
    prefill_context: FloatArray  # tokens of earlier chunks and cached prefixes that prefill reads
    arrival: IntArray  # per request: the first step in which it could have started
    first_token: IntArray  # per request: the step that samples its first token
    end: IntArray  # per request: its last step
    max_running: int  # most sequences that ran at once

    def __len__(self) -> int:
        return len(self.decode_seqs)

    @property
    def tokens(self) -> IntArray:
        return self.decode_seqs + self.prefill_tokens


def simulate(workload: Workload, limits: StepLimits) -> Steps:
    return _Simulation(workload, limits).run()


class _Simulation:
    """Requests in starting order; the arrays of running sequences are replaced at each event."""

    def __init__(self, workload: Workload, limits: StepLimits) -> None:
        prompts, outputs, groups, prefixes = workload.columns()
        self._is_closed_loop = workload.concurrency is not None
        order = np.arange(len(prompts))
        if not self._is_closed_loop:  # as engine/offline_order.py: long answers first, prefixes side by side
            order = np.lexsort((order, groups, -outputs))
        self._order = order
        self._prompts, self._outputs = prompts[order], outputs[order]
        self._groups = groups[order]
        self._prefixes = np.where(self._groups >= 0, prefixes[order], 0) // limits.block_size * limits.block_size
        self._limits = limits
        self._max_running = self._target(workload)
        self._min_free = 1 if self._is_closed_loop else limits.min_free_slots_to_start
        self._cached_groups = np.zeros(max(int(groups.max()) + 1, 1), dtype=bool)
        self._next = 0  # the first request that has not started
        self._partial: tuple[int, int] | None = None  # a prompt in chunks, and its tokens that are computed
        empty = np.zeros(0, dtype=np.int64)
        self._ids, self._remaining, self._lens = empty, empty, empty
        self._rows: list[FloatArray] = []
        self._num_steps = 0
        self._peak = 0
        self._first_token = np.zeros(len(prompts), dtype=np.int64)
        self._end = np.zeros(len(prompts), dtype=np.int64)

    def _target(self, workload: Workload) -> int:
        limits = self._limits
        if workload.concurrency is not None:
            return min(workload.concurrency, limits.max_num_seqs)
        if limits.full_rate_seqs is None:
            return limits.max_num_seqs
        target = max(limits.full_rate_seqs, -(-int(self._outputs.sum()) // int(self._outputs.max())))
        return min(target, limits.max_num_seqs)

    def run(self) -> Steps:
        while self._next < len(self._prompts) or len(self._ids) or self._partial:
            if not self._start():
                self._decode()
            self._peak = max(self._peak, len(self._ids) + (self._partial is not None))
        table = np.concatenate(self._rows, axis=1)
        decode_seqs, prefill_tokens, prompts, sampled = table[:4].astype(np.int64)
        context_tokens, pairs, prefill_context = table[4:]
        first, end = np.empty_like(self._first_token), np.empty_like(self._end)
        first[self._order], end[self._order] = self._first_token, self._end
        return Steps(
            decode_seqs=decode_seqs,
            prefill_tokens=prefill_tokens,
            prompts=prompts,
            sampled=sampled,
            context_tokens=context_tokens,
            pairs=pairs,
            prefill_context=prefill_context,
            arrival=self._arrivals(end),
            first_token=first,
            end=end,
            max_running=self._peak,
        )

    def _arrivals(self, end: IntArray) -> IntArray:
        arrival = np.zeros_like(end)
        if self._is_closed_loop and self._max_running < len(end):
            arrival[self._max_running :] = np.sort(end)[: len(end) - self._max_running] + 1
        return arrival

    # ---- a step with prompts

    def _start(self) -> bool:
        """Compute one step with prompts, if any may start."""
        limits, num_waiting = self._limits, len(self._prompts) - self._next
        num_startable = self._max_running - len(self._ids) - (self._partial is not None)
        budget = limits.max_num_batched_tokens - len(self._ids)
        chunks: list[tuple[int, int, int]] = []  # request, tokens, context before them
        if self._partial is not None:
            request, computed = self._partial
            num_tokens = min(int(self._prompts[request]) - computed, budget)
            chunks.append((request, num_tokens, computed))
            budget -= num_tokens
            self._note_prefix(request, computed + num_tokens)
        may_start = num_startable > 0 and num_startable >= min(self._min_free, num_waiting)
        first = self._next
        whole = self._fitting(num_startable, budget) if may_start and num_waiting and budget > 0 else 0
        new_tokens, contexts = self._tokens_of(first, whole)
        budget -= int(new_tokens.sum())
        used = limits.max_num_batched_tokens - budget
        may_chunk = may_start and budget > 0 and used < limits.full_step_tokens
        may_chunk = may_chunk and whole < min(num_startable, num_waiting) and self._num_that_fit(whole + 1) > whole
        self._next += whole
        groups = self._groups[first : first + whole]
        self._cached_groups[groups[groups >= 0]] = True
        if may_chunk:
            chunks += self._first_chunk(budget)
        if not whole and not chunks:
            return False
        self._take(first, whole, new_tokens, contexts, chunks)
        return True

    def _first_chunk(self, budget: int) -> list[tuple[int, int, int]]:
        """Part of the next prompt, which exceeds the budget as a whole."""
        request = self._next
        (num_tokens,), (context,) = self._tokens_of(request, 1)
        if num_tokens <= budget:  # its prefix is computed in this very step: it starts in the next one
            return []
        self._next += 1
        self._note_prefix(request, int(context) + budget)
        return [(request, budget, int(context))]

    def _note_prefix(self, request: int, num_computed: int) -> None:
        """Others may share the prefix of a chunked prompt as soon as all of it is computed."""
        if self._groups[request] >= 0 and num_computed >= self._prefixes[request]:
            self._cached_groups[self._groups[request]] = True

    def _tokens_of(self, first: int, count: int) -> tuple[IntArray, IntArray]:
        """Tokens to compute and tokens cached, of the next requests."""
        groups, prefixes = self._groups[first : first + count], self._prefixes[first : first + count]
        cached = np.zeros(count, dtype=np.int64)
        if count and prefixes.any():
            is_first = np.zeros(count, dtype=bool)
            is_first[np.unique(groups, return_index=True)[1]] = True
            has_prefix = (groups >= 0) & (self._cached_groups[groups] | ~is_first)
            cached = np.where(has_prefix, np.minimum(prefixes, self._prompts[first : first + count] - 1), 0)
        return self._prompts[first : first + count] - cached, cached

    def _fitting(self, num_startable: int, budget: int) -> int:
        """How many of the next requests start with their whole prompt in this step."""
        count = min(num_startable, len(self._prompts) - self._next, budget)
        new_tokens, _ = self._tokens_of(self._next, count)
        count = int(np.searchsorted(np.cumsum(new_tokens), budget, side="right"))
        return self._num_that_fit(count)

    def _num_that_fit(self, count: int) -> int:
        """How many of the next `count` requests the cache holds to their ends, by bisection."""
        if count == 0 or self._fits(count):
            return count
        low, high = 0, count  # `low` fit, `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return 1 if low == 0 and not len(self._ids) and self._partial is None else low

    def _fits(self, count: int) -> bool:
        ids = np.concatenate((self._ids, np.arange(self._next, self._next + count)))
        if self._partial is not None:
            ids = np.append(ids, self._partial[0])
        lens = self._prompts[ids] + 1
        lens[: len(self._ids)] = self._lens
        remaining = self._outputs[ids] - 1
        remaining[: len(self._ids)] = self._remaining
        # A block is half empty on average; a prefix is held once for its group.
        own = lens - self._prefixes[ids] + self._limits.block_size // 2
        shared = self._prefixes[ids[np.unique(self._groups[ids], return_index=True)[1]]].sum()
        now = int(own.sum() + shared)
        if now > self._limits.cache_tokens * (1.0 - WATERMARK):
            return False
        order = np.argsort(remaining, kind="stable")
        freed = np.cumsum(own[order]) - own[order]
        growth = remaining[order] * (len(ids) - np.arange(len(ids))) - freed
        return now + int(growth.max()) <= self._limits.cache_tokens * (1.0 + OVERCOMMIT)

    def _take(
        self, first: int, whole: int, new_tokens: IntArray, contexts: IntArray, chunks: list[tuple[int, int, int]]
    ) -> None:
        started = np.arange(first, first + whole)
        self._partial = None
        for request, num_tokens, context in chunks:
            new_tokens, contexts = np.append(new_tokens, num_tokens), np.append(contexts, context)
            if context + num_tokens == self._prompts[request]:
                started = np.append(started, request)
            else:
                self._partial = (request, context + num_tokens)
        sizes = new_tokens.astype(np.float64)
        decoded, context_tokens = len(self._ids), self._context_now()
        row = (
            decoded,
            sizes.sum(),
            len(sizes),
            decoded + len(started),
            context_tokens,
            (sizes * contexts + sizes * (sizes + 1) / 2).sum(),
            contexts.sum(),
        )
        self._rows.append(np.array(row, dtype=np.float64)[:, None])
        self._advance(1)
        self._first_token[started] = self._num_steps - 1
        self._ids = np.concatenate((self._ids, started))
        self._remaining = np.concatenate((self._remaining, self._outputs[started] - 1))
        self._lens = np.concatenate((self._lens, self._prompts[started] + 1))
        self._retire()

    def _context_now(self) -> float:
        if not len(self._ids):
            return 0.0
        own = self._lens - self._prefixes[self._ids]
        return float(own.sum()) + float(self._shared_prefixes(self._ids)[0].sum())

    def _shared_prefixes(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Prefix lengths of the groups among these sequences, and for how many more steps each is read."""
        prefixes = self._prefixes[ids]
        if not prefixes.any():
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        groups, where = np.unique(self._groups[ids], return_inverse=True)
        lens, until = np.zeros(len(groups), dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
        np.maximum.at(lens, where, prefixes)
        np.maximum.at(until, where, self._remaining)
        return lens, until

    # ---- steps that only decode

    def _decode(self) -> None:
        """Decode until enough sequences have ended for others to start, or all have."""
        order = np.argsort(self._remaining, kind="stable")
        remaining = self._remaining[order]
        num_waiting = len(self._prompts) - self._next
        num_needed = len(remaining)
        if num_waiting:
            num_free = self._max_running - len(remaining)
            wanted = min(self._min_free, num_waiting) - num_free
            num_needed = min(len(remaining), max(1, wanted))  # 1: a slot is free, but the cache was full
        count = int(remaining[num_needed - 1])
        steps = np.arange(count)
        num_ended = np.searchsorted(remaining, steps, side="right")
        alive = len(remaining) - num_ended
        own = (self._lens - self._prefixes[self._ids])[order]
        left = np.append(np.cumsum(own[::-1])[::-1], 0)[num_ended]  # own tokens at step 0 of those that still decode
        context = left + alive * steps
        lens, until = self._shared_prefixes(self._ids)
        if len(lens):
            by_end = np.argsort(until, kind="stable")
            kept = np.append(np.cumsum(lens[by_end][::-1])[::-1], 0)
            context = context + kept[np.searchsorted(until[by_end], steps, side="right")]
        none = np.zeros(count)
        self._rows.append(np.stack((alive, none, none, alive, context, none, none)).astype(np.float64))
        self._advance(count)
        self._retire()

    def _advance(self, count: int) -> None:
        self._end[self._ids] = self._num_steps + np.minimum(self._remaining, count) - 1
        self._num_steps += count
        self._remaining = self._remaining - count
        self._lens = self._lens + count

    def _retire(self) -> None:
        is_over = self._remaining <= 0
        just_started = is_over & (self._first_token[self._ids] == self._num_steps - 1)
        self._end[self._ids[just_started]] = self._num_steps - 1  # an answer of one token ends with its prompt
        keep = ~is_over
        self._ids, self._remaining, self._lens = self._ids[keep], self._remaining[keep], self._lens[keep]
