"""Gives running sequences more blocks as their tokens grow."""

from __future__ import annotations

import numpy as np

from headrace.kv import BlockTable, BlockTables
from headrace.sched.capacity import Capacity
from headrace.sched.plan_builder import PlanBuilder
from headrace.sched.slots import SlotTable
from headrace.steps import IntArray


class Growth:
    """Appends blocks to the tables of slots. Owns nothing: blocks belong to `tables`, slots to `slots`."""

    def __init__(self, tables: BlockTables, slots: SlotTable, capacity: Capacity) -> None:
        self._tables = tables
        self._slots = slots
        self._capacity = capacity

    def append_block(self, slots: IntArray, builder: PlanBuilder) -> None:
        """Give one more block to each of these slots. The caller has checked that there are enough."""
        blocks = self._tables.pool.take(len(slots))
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self._table_of(slot).blocks.append(block)
        indexes = self._slots.capacity[slots] // self._tables.block_size
        builder.write_tables(slots, indexes, np.array(blocks, np.int64))
        self._slots.capacity[slots] += self._tables.block_size
        self._capacity.grew(len(slots))

    def make_room(self, slots: IntArray, num_tokens: IntArray, builder: PlanBuilder) -> bool:
        """Give each of these slots room for `num_tokens`; returns whether there were enough blocks for all."""
        counts = np.maximum(-((self._slots.capacity[slots] - num_tokens) // self._tables.block_size), 0)
        if counts.sum() > self._tables.pool.num_available:
            return False
        while (counts > 0).any():
            self.append_block(slots[counts > 0], builder)
            counts -= 1
        return True

    def _table_of(self, slot: int) -> BlockTable:
        sequence = self._slots.sequences[slot]
        assert sequence is not None and sequence.table is not None, f"slot {slot} has no owner"
        return sequence.table
