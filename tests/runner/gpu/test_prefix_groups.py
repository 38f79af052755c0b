from __future__ import annotations

import numpy as np

from headrace.runner.gpu.prefix_groups import MIN_BLOCKS, MIN_SEQS, BlockTableMirror, PrefixGroups
from headrace.steps import TableWrites


def mirror_of(tables: list[list[int]]) -> BlockTableMirror:
    mirror = BlockTableMirror(len(tables), 64)
    for slot, blocks in enumerate(tables):
        mirror.write(writes(slot, 0, blocks))
    return mirror


def writes(slot: int, start: int, blocks: list[int]) -> TableWrites:
    indexes = np.arange(start, start + len(blocks))
    return TableWrites(np.full(len(blocks), slot), indexes, np.array(blocks))


def groups_of(mirror: BlockTableMirror, slots: list[int]) -> PrefixGroups | None:
    return mirror.groups(np.array(slots), block_size=16, seqs_per_tile=8)


def sharing(num_slots: int, num_shared: int, first: int = 1000) -> list[list[int]]:
    """Tables with a common prefix and two blocks of their own."""
    common = list(range(first, first + num_shared))
    return [[*common, first + 500 + 2 * slot, first + 501 + 2 * slot] for slot in range(num_slots)]


def test_slots_with_a_common_prefix_form_tiles() -> None:
    groups = groups_of(mirror_of(sharing(10, 12)), list(range(10)))
    assert groups is not None
    assert groups.lens.tolist() == [12 * 16] * 10
    assert groups.tile_lens.tolist() == [12 * 16] * 2
    assert sorted(groups.tile_seqs[groups.tile_seqs >= 0].tolist()) == list(range(10))


def test_tiles_contain_indexes_in_the_step_not_slots() -> None:
    mirror = mirror_of([[1, 2], *sharing(4, 12)])
    groups = groups_of(mirror, [4, 0, 2, 1, 3])
    assert groups is not None
    assert groups.lens.tolist() == [192, 0, 192, 192, 192]
    assert sorted(groups.tile_seqs[0][:4].tolist()) == [0, 2, 3, 4]


def test_few_slots_or_a_short_prefix_form_no_group() -> None:
    assert groups_of(mirror_of(sharing(MIN_SEQS - 1, 12)), list(range(MIN_SEQS - 1))) is None
    assert groups_of(mirror_of(sharing(10, MIN_BLOCKS - 1)), list(range(10))) is None


def test_two_groups_have_tiles_of_their_own() -> None:
    mirror = mirror_of(sharing(5, 10) + sharing(6, 20, first=5000))
    groups = groups_of(mirror, list(range(11)))
    assert groups is not None
    assert groups.lens.tolist() == [160] * 5 + [320] * 6
    assert sorted(groups.tile_lens.tolist()) == [160, 320]


def test_blocks_of_a_former_owner_of_a_slot_do_not_count() -> None:
    mirror = mirror_of(sharing(5, 12))
    mirror.write(writes(0, 0, [7, 8, 9]))  # slot 0 has a new owner with three blocks
    groups = groups_of(mirror, list(range(5)))
    assert groups is not None
    assert groups.lens.tolist() == [0] + [192] * 4


def test_the_block_that_is_being_written_is_never_shared() -> None:
    mirror = mirror_of([list(range(100, 112))] * 5)  # as if all had the same last block
    groups = groups_of(mirror, list(range(5)))
    assert groups is not None
    assert groups.lens.tolist() == [11 * 16] * 5
