"""The sizes of decode graphs."""

from __future__ import annotations

from headrace.runner.gpu.graph_sizes import decode_graph_size, fastest_sizes, sharing_graph_size


def test_a_step_is_padded_to_a_larger_size_only_if_that_is_clearly_faster() -> None:
    measured = {1: 4.0, 2: 4.1, 4: 4.0, 8: 3.9, 384: 14.0, 416: 9.0, 448: 14.0, 480: 10.0, 512: 9.9}
    fastest = fastest_sizes(measured)
    assert fastest == {1: 1, 2: 8, 4: 4, 8: 8, 384: 416, 416: 416, 448: 512, 480: 480, 512: 512}


def test_a_graph_has_room_for_all_sequences_of_a_step() -> None:
    sizes = [decode_graph_size(num_seqs) for num_seqs in range(1, 2050)]
    shared = [sharing_graph_size(num_seqs, sizes[-1]) for num_seqs in range(1, 2050)]
    for found in (sizes, shared):
        assert all(size >= num_seqs for num_seqs, size in enumerate(found, start=1))
        assert found == sorted(found)
    assert {decode_graph_size(size) for size in sizes} == set(sizes)
    assert all(sharing_graph_size(num_seqs, decode_graph_size(num_seqs)) >= num_seqs for num_seqs in range(1, 2050))
