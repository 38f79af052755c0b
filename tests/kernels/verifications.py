"""A step that verifies random drafts, and what its slots get: the kernels that append tokens are compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.steps import BROKEN, FULL, STOPPED, UNFINISHED

NUM_SLOTS, MAX_LEN = 40, 64


@dataclass(frozen=True)
class Verification:
    slots: Tensor  # [S] int64
    num_rows: Tensor  # [S] int64
    sampled: Tensor  # [R] int64
    flags: Tensor  # [R] uint8
    tokens: Tensor  # [NUM_SLOTS, MAX_LEN] int32, with the drafts
    lens: Tensor  # [NUM_SLOTS] int64
    end_len: Tensor  # [NUM_SLOTS] int64
    stops: Tensor  # [NUM_SLOTS, 4] int64

    @classmethod
    def random(cls, *, most_drafts: int = 4) -> Verification:
        """Half of the drafts are what is sampled."""
        slots, num_rows = torch.randperm(NUM_SLOTS)[:30], 1 + torch.randint(most_drafts + 1, (30,))
        sampled = torch.randint(4, (int(num_rows.sum()),))
        flags = (torch.randint(20, sampled.shape) == 0).to(torch.uint8) * BROKEN
        lens, tokens = 1 + torch.randint(30, (NUM_SLOTS,)), torch.randint(9, (NUM_SLOTS, MAX_LEN)).int()
        for slot, rows in zip(slots.tolist(), sampled.split(num_rows.tolist()), strict=True):
            guesses = torch.where(torch.randint(2, (len(rows) - 1,)) == 0, rows[:-1], 5)
            tokens[slot, lens[slot] : lens[slot] + len(guesses)] = guesses.int()
        stops = torch.full((NUM_SLOTS, 4), -1)
        stops[:, 1] = torch.where(torch.randint(3, (NUM_SLOTS,)) == 0, torch.randint(4, (NUM_SLOTS,)), -1)
        return cls(slots, num_rows, sampled, flags, tokens, lens, lens + 2 + torch.randint(5, (NUM_SLOTS,)), stops)

    @property
    def first_rows(self) -> Tensor:
        return self.num_rows.cumsum(0) - self.num_rows

    def expected(self) -> list[tuple[int, int]]:
        """How many tokens each slot gets, and its state after them: one token at a time."""
        found = []
        for slot, first, num_rows in zip(
            self.slots.tolist(), self.first_rows.tolist(), self.num_rows.tolist(), strict=True
        ):
            num = 0
            while True:
                token, length = int(self.sampled[first + num]), int(self.lens[slot]) + num
                state = FULL if length + 1 >= self.end_len[slot] else UNFINISHED
                state = STOPPED if token in self.stops[slot].tolist() else state
                state = BROKEN if self.flags[first + num] else state
                num += 1
                if num == num_rows or state != UNFINISHED or self.tokens[slot, length] != token:
                    break
            found.append((num, state))
        return found
