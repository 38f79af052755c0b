"""Copies whole KV-cache blocks between a GPU and pinned memory of the host, all layers in one kernel.

A few programs do all of the work, each item (one block of one side of a layer) in turn: the bus needs no more of them,
and the other multiprocessors stay with the step that runs beside.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUM_PROGRAMS = 32  # about 256 KiB in flight, where a bus of 50 GB/s and 2 us needs 100 KiB; not measured yet
_WORDS = 1024  # of 8 bytes, per loop iteration


def copy_blocks_to_rows(addresses: Tensor, side_words: int, blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies blocks[i] of all sides to rows[places[i]]. See `reference.copy_blocks_to_rows`.

    `addresses` [sides] int64: where the memory of each side starts, blocks of `side_words` words one after the other.
    `rows` [num_places, sides * side_words] int64 may be in pinned memory of the host."""
    _launch(addresses, side_words, blocks, rows, places, to_rows=True)


def copy_rows_to_blocks(addresses: Tensor, side_words: int, blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies rows[places[i]] to blocks[i] of all sides."""
    _launch(addresses, side_words, blocks, rows, places, to_rows=False)


def _launch(addresses: Tensor, side_words: int, blocks: Tensor, rows: Tensor, places: Tensor, *, to_rows: bool) -> None:
    num_items = len(blocks) * len(addresses)
    assert rows.is_contiguous() and rows.shape[1] == len(addresses) * side_words
    if not num_items:
        return
    _copy[(min(num_items, _NUM_PROGRAMS),)](
        addresses,
        blocks,
        rows,
        places,
        len(blocks),
        len(addresses),
        SIDE_WORDS=side_words,
        WORDS=min(_WORDS, triton.next_power_of_2(side_words)),
        TO_ROWS=to_rows,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_blocks", "num_sides"])
def _copy(
    addresses,
    blocks,
    rows,
    places,
    num_blocks,
    num_sides,
    SIDE_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    TO_ROWS: tl.constexpr,
):
    words = tl.arange(0, WORDS)
    for item in range(tl.program_id(0), num_blocks * num_sides, tl.num_programs(0)):
        index, side = item // num_sides, item % num_sides
        block = tl.load(blocks + index).to(tl.int64)
        place = tl.load(places + index).to(tl.int64)
        start_of_side = tl.multiple_of(tl.load(addresses + side), 16)
        cache = start_of_side.to(tl.pointer_type(tl.int64)) + block * SIDE_WORDS
        row = rows + (place * num_sides + side) * SIDE_WORDS
        for start in range(0, SIDE_WORDS, WORDS):
            inside = start + words < SIDE_WORDS
            if TO_ROWS:
                tl.store(row + start + words, tl.load(cache + start + words, mask=inside), mask=inside)
            else:
                tl.store(cache + start + words, tl.load(row + start + words, mask=inside), mask=inside)
