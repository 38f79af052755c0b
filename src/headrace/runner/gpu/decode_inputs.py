"""The input buffers of decode graphs: fixed memory that a step fills and a captured graph reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu.shared_attention import max_tiles
from headrace.kernels.layout import SharedPrefixes
from headrace.runner.gpu.ticket import RESULTS_IN_FLIGHT
from headrace.steps import IntArray


class RowInputs:
    """Which slot each row of a decode graph belongs to, and in a step with drafts which token: written by the host, in
    one copy a step. Rows that are left over have the padding slot."""

    def __init__(self, size: int, padding_slot: int, device: torch.device, *, has_drafts: bool) -> None:
        shape = (4 if has_drafts else 1, size)
        self._values = torch.zeros(shape, dtype=torch.int32, device=device)
        self._values[0] = padding_slot
        self._pinned = torch.zeros(RESULTS_IN_FLIGHT, *shape, dtype=torch.int32, pin_memory=True)
        self._padding_slot = padding_slot
        self._next = 0

    def put(self, slots: IntArray, size: int) -> None:
        """One row of each slot, for a graph of `size` rows."""
        pinned = self._fill(slots, size)
        self._values[0, :size].copy_(pinned[0, :size], non_blocking=True)
        if self.has_drafts:
            self._values[1].zero_()

    def put_drafts(self, slots: IntArray, num_rows: IntArray, drafts: IntArray | None, size: int) -> None:
        """`num_rows` of each slot: the known token and its drafts. Drafts of all slots, one after the other; None: a
        draft model has put them behind the tokens of the slots."""
        starts = np.cumsum(num_rows) - num_rows
        pinned = self._fill(np.repeat(slots, num_rows), size)
        _, offsets, tokens, counts = pinned.numpy()
        num_used = int(num_rows.sum())
        offsets[:num_used] = np.arange(num_used) - np.repeat(starts, num_rows)
        offsets[num_used:] = 0
        tokens[:] = -1
        if drafts is not None:
            tokens[:num_used][offsets[:num_used] > 0] = drafts
        counts[:] = 0
        counts[starts] = num_rows
        self._values.copy_(pinned, non_blocking=True)

    def _fill(self, row_slots: IntArray, size: int) -> Tensor:
        pinned = self._pinned[self._next]
        self._next = (self._next + 1) % RESULTS_IN_FLIGHT
        slots = pinned.numpy()[0]
        slots[: len(row_slots)] = row_slots
        slots[len(row_slots) : size] = self._padding_slot
        return pinned

    @property
    def has_drafts(self) -> bool:
        return len(self._values) > 1

    def slots(self, size: int) -> Tensor:  # [size] int32
        return self._values[0, :size]

    def offsets(self, size: int) -> Tensor | None:  # [size] int32, 0, 1, 2 ... for the rows of a slot
        return self._values[1, :size] if self.has_drafts else None

    def drafts(self, size: int) -> Tensor | None:  # [size] int32, see `prepare_decode`
        return self._values[2, :size] if self.has_drafts else None

    def num_rows(self, size: int) -> Tensor:  # [size] int32, see `accept_drafts`
        return self._values[3, :size]


class DecodeInputs:
    """What `prepare_decode` writes and a graph reads, for the largest graph; smaller ones use the front of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(size, dtype=torch.int64, device=device)
        self.context_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def first(self, size: int) -> DecodeInputs:
        part = object.__new__(DecodeInputs)
        part.token_ids, part.positions = self.token_ids[:size], self.positions[:size]
        part.slot_mapping, part.context_lens = self.slot_mapping[:size], self.context_lens[:size]
        part.query_starts = self.query_starts[: size + 1]
        return part


class SharedPrefixInputs:
    """The prefix groups of a step (see `prefix_groups`), for the largest graph; smaller ones use the front of it."""

    def __init__(self, size: int, seqs_per_tile: int, device: torch.device) -> None:
        num_tiles = max_tiles(size)
        self._lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._tile_seqs = torch.full((num_tiles, seqs_per_tile), -1, dtype=torch.int32, device=device)
        self._tile_lens = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def fill(self, lens: Tensor, tile_seqs: Tensor, tile_lens: Tensor) -> None:
        self._lens.zero_()
        self._lens[: len(lens)] = lens
        self._tile_seqs.view(-1)[: len(tile_seqs)] = tile_seqs
        self._tile_lens.zero_()
        self._tile_lens[: len(tile_lens)] = tile_lens

    def first(self, size: int) -> SharedPrefixes:
        num_tiles = max_tiles(size)
        return SharedPrefixes(self._lens[:size], self._tile_seqs[:num_tiles], self._tile_lens[:num_tiles])
