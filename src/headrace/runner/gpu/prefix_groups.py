"""Finds running sequences whose prompts share a prefix, so that decode attention reads its blocks once for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.steps import IntArray, TableWrites

MIN_SEQS = 4  # fewer read their prefixes faster on their own
MIN_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """The host's form of `kernels.layout.SharedPrefixes`."""

    lens: IntArray  # [S]
    tile_seqs: IntArray  # [tiles, SEQS]
    tile_lens: IntArray  # [tiles]


class BlockTableMirror:
    """The device's block tables as the host last wrote them."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._tables = np.zeros((num_slots, max_blocks), np.int32)
        self._num_blocks = np.zeros(num_slots, np.int64)

    def write(self, writes: TableWrites) -> None:
        self._tables[writes.slots, writes.indexes] = writes.blocks
        starts = writes.slots[writes.indexes == 0]
        self._num_blocks[starts] = 0  # the slot has a new owner
        np.maximum.at(self._num_blocks, writes.slots, writes.indexes + 1)

    def groups(self, slots: IntArray, *, block_size: int, seqs_per_tile: int) -> PrefixGroups | None:
        """Group slots by their first block, each group with the blocks that all of its slots have in common."""
        firsts = self._tables[slots, 0]
        order = np.argsort(firsts, kind="stable")
        borders = np.flatnonzero(np.diff(firsts[order], prepend=-1, append=-1))
        lens = np.zeros(len(slots), np.int64)
        tiles: list[IntArray] = []  # each [SEQS]
        tile_lens: list[int] = []
        for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if end - begin < MIN_SEQS:
                continue
            members = order[begin:end]
            num_blocks = self._num_common(slots[members])
            if num_blocks < MIN_BLOCKS:
                continue
            lens[members] = num_blocks * block_size
            for first in range(0, len(members), seqs_per_tile):
                part = members[first : first + seqs_per_tile]
                tiles.append(np.full(seqs_per_tile, -1))
                tiles[-1][: len(part)] = part
                tile_lens.append(num_blocks * block_size)
        if not tiles:
            return None
        return PrefixGroups(lens, np.stack(tiles), np.array(tile_lens, np.int64))

    def _num_common(self, slots: IntArray) -> int:
        num_own = int(self._num_blocks[slots].min()) - 1  # the last block is being written
        if num_own < MIN_BLOCKS:
            return 0
        tables = self._tables[slots, :num_own]
        is_common = (tables == tables[0]).all(axis=0)
        return num_own if is_common.all() else int(is_common.argmin())
