"""A runner without a model: the next token is a hash of the row's seed and position. For tests and for measuring
what the host costs; no torch."""

from __future__ import annotations

import numpy as np

from headrace.steps import FULL, GOES_ON, STOPPED, IntArray, Masks, Read, Reading, StepPlan, StepResult


class FakeRunner:
    """Rows as a device would have them, results ready at once."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int = 32_000) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self._len = np.zeros(max_num_seqs, np.int64)
        self._end = np.zeros(max_num_seqs, np.int64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._stops: dict[int, frozenset[int]] = {}

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        self.num_steps += 1
        for admission in plan.admissions:
            self._len[admission.row] = len(admission.token_ids)
            self._end[admission.row] = admission.end_len
            self._seed[admission.row] = admission.seed & 0xFFFFFFFFFFFFFFFF
            self._stops.pop(admission.row, None)
            if admission.stop_token_ids:
                self._stops[admission.row] = frozenset(admission.stop_token_ids)
        rows = plan.rows[plan.samples]
        tokens = self._next_tokens(rows)
        if masks is not None:
            self._keep_to(masks, rows, tokens)
        self._len[rows] += 1
        finished = np.where(self._len[rows] >= self._end[rows], FULL, GOES_ON).astype(np.uint8)
        for position, row in enumerate(rows.tolist()) if self._stops else ():
            if tokens[position] in self._stops.get(row, ()):
                finished[position] = STOPPED
        return StepResult(plan.step, rows, tokens, finished, readings=tuple(map(_reading, plan.reads)))

    def _keep_to(self, masks: Masks, rows: IntArray, tokens: IntArray) -> None:
        """Where a token is forbidden, one that is not takes its place."""
        place_of = {row: place for place, row in enumerate(rows.tolist())}
        for row, line in zip(masks.rows.tolist(), masks.bits(), strict=True):
            allowed = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))
            place = place_of[row]
            tokens[place] = allowed[tokens[place] % len(allowed)] if len(allowed) else 0

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass

    def _next_tokens(self, rows: IntArray) -> IntArray:
        mixed = self._seed[rows] + self._len[rows].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(31)
        tokens: IntArray = (mixed % np.uint64(self.vocab_size)).astype(np.int64)
        return tokens


def _reading(read: Read) -> Reading:
    """A hidden state of [1], and as the log-probability of a token its negative."""
    values = np.array([read.num_tokens]) if read.targets is None else -read.targets
    return Reading(read.row, read.is_last, values.astype(np.float32))
