"""The sizes of decode graphs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from headrace.kernels.layout import Splits
from headrace.models.hub_config import spec_from_config
from headrace.runner.gpu.decode_inputs import enable_sharing, fastest_sizes, graph_size, sharing_size, splits_of


def test_a_step_is_padded_to_a_larger_size_only_if_that_is_clearly_faster() -> None:
    measured = {1: 4.0, 2: 4.1, 4: 4.0, 8: 3.9, 384: 14.0, 416: 9.0, 448: 14.0, 480: 10.0, 512: 9.9}
    fastest = fastest_sizes(measured)
    assert fastest == {1: 1, 2: 8, 4: 4, 8: 8, 384: 416, 416: 416, 448: 512, 480: 480, 512: 512}


def test_sizes_never_have_less_room_than_the_rows_of_a_step() -> None:
    sizes = [graph_size(num_rows) for num_rows in range(1, 2050)]
    shared = [sharing_size(num_rows, sizes[-1]) for num_rows in range(1, 2050)]
    for found in (sizes, shared):
        assert all(size >= num_rows for num_rows, size in enumerate(found, start=1))
        assert found == sorted(found)
    assert {graph_size(size) for size in sizes} == set(sizes)
    assert all(sharing_size(num_rows, most=graph_size(num_rows)) >= num_rows for num_rows in range(1, 2050))


def test_beginnings_are_shared_where_no_context_outgrows_a_window() -> None:
    spec = spec_from_config(
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 100,
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    assert enable_sharing(spec, 100)
    assert not enable_sharing(spec, 101)


@pytest.mark.parametrize("group_size", [4, 5, 6, 9, 13, 17])
@pytest.mark.parametrize("seqs_per_tile", [4, 5, 16])
def test_there_is_room_for_the_tiles_of_any_groups(group_size: int, seqs_per_tile: int) -> None:
    from headrace.kernels.gpu.shared_attention import max_tiles

    for num_seqs in range(group_size, 300):
        num_groups, rest = divmod(num_seqs, group_size)
        tiles_of_group = -(-group_size // seqs_per_tile)
        tiles_of_last = -(-(group_size + rest) // seqs_per_tile)
        assert (num_groups - 1) * tiles_of_group + tiles_of_last <= max_tiles(num_seqs)


def test_contexts_are_cut_where_programs_would_be_few_or_one_would_be_last() -> None:
    assert splits_of(1, 8, 128, 131072) == Splits(32, 64)
    assert splits_of(16, 8, 128, 131072) == Splits(4, 64)
    assert splits_of(512, 8, 128, 131072) == Splits(4, 1024, num_seqs=32)
    assert splits_of(1024, 8, 128, 131072) == Splits(4, 1024, num_seqs=64)
    assert splits_of(448, 8, 128, 4096) == Splits(4, 1024, num_seqs=32)
    assert splits_of(512, 8, 128, 4096) == Splits()  # the longest is read before the others are done
    assert splits_of(512, 8, 64, 4096) == Splits(4, 1024, num_seqs=32)
    assert splits_of(512, 8, 64, 1024) == Splits()
