"""Which models share prefixes in decode, and the tiles of groups."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from headrace.models.hub_config import spec_from_config
from headrace.runner.gpu.prefix_sharing import can_share_prefixes


def test_prefixes_are_shared_where_no_context_outgrows_a_window() -> None:
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
    assert can_share_prefixes(spec, 100)
    assert not can_share_prefixes(spec, 101)


@pytest.mark.parametrize("group_size", [4, 5, 6, 9, 13, 17])
@pytest.mark.parametrize("seqs_per_tile", [4, 5, 16])
def test_there_is_room_for_the_tiles_of_any_groups(group_size: int, seqs_per_tile: int) -> None:
    from headrace.kernels.gpu.shared_attention import max_tiles

    for num_seqs in range(group_size, 300):
        num_groups, rest = divmod(num_seqs, group_size)
        tiles_of_group = -(-group_size // seqs_per_tile)
        tiles_of_last = -(-(group_size + rest) // seqs_per_tile)
        assert (num_groups - 1) * tiles_of_group + tiles_of_last <= max_tiles(num_seqs)
