from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from headrace.dist.collectives import TensorGroup
from headrace.dist.mesh import Span, divided
from headrace.dist.peer_memory import PeerAccessError, agreed
from tests.dist.ranks import on_ranks


def test_the_sum_over_the_ranks_is_the_same_on_all() -> None:
    parts = torch.randn(3, 5, 7)
    sums = on_ranks(3, lambda group: group.all_reduce(parts[group.mesh.tensor_rank].clone()))
    torch.testing.assert_close(sums[0], parts.sum(0))
    assert all(torch.equal(each, sums[0]) for each in sums)


@pytest.mark.parametrize("widths", [(4, 4), (3, 2, 2)])
def test_gathered_columns_are_those_of_the_ranks_in_order_and_bitwise_equal(widths: tuple[int, ...]) -> None:
    whole = torch.randn(6, sum(widths))
    parts = whole.split(widths, dim=1)

    def gather(group: TensorGroup) -> torch.Tensor:
        return group.gather_columns(parts[group.mesh.tensor_rank], widths)

    assert all(torch.equal(each, whole) for each in on_ranks(len(widths), gather))


def test_all_ranks_get_the_largest_of_each_number() -> None:
    values = [[1.0, 8.0], [3.0, 2.0]]
    found = on_ranks(2, lambda group: group.maxima(values[group.mesh.tensor_rank], torch.device("cpu")))
    assert found == [[3.0, 8.0]] * 2


@pytest.mark.parametrize(
    ("num_units", "num_parts", "sizes"), [(6, 2, [3, 3]), (3, 2, [2, 1]), (9, 4, [3, 2, 2, 2]), (1, 3, [1, 0, 0])]
)
def test_units_are_divided_into_consecutive_parts_of_nearly_equal_size(
    num_units: int, num_parts: int, sizes: list[int]
) -> None:
    parts = divided(num_units, num_parts)
    assert [part.size for part in parts] == sizes
    assert parts[0].start == 0 and parts[-1].end == num_units
    assert all(before.end == after.start for before, after in zip(parts[:-1], parts[1:], strict=True))
    assert Span(1, 3).times(16) == Span(16, 48)


class NegativeSums:
    """In place of the transport for small sums: returns what no sum would."""

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return math.prod(shape) <= 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg_()

    def abort(self) -> None:
        pass


def test_small_sums_take_their_own_way() -> None:
    def sums(group: TensorGroup) -> list[list[float]]:
        group = group.with_small_sums(NegativeSums())
        return [group.all_reduce(torch.ones(size)).tolist() for size in (4, 5)]

    assert on_ranks(2, sums) == [[[-1.0] * 4, [2.0] * 5]] * 2


def test_small_columns_are_gathered_as_a_sum_with_zeros() -> None:
    def gathered(group: TensorGroup) -> tuple[list[float], int]:
        rank, sums = group.mesh.tensor_rank, group.with_small_sums(NegativeSums())
        found = sums.gather_columns(torch.ones(1, 2 - rank) * (rank + 1), [2, 1])
        return found[0].tolist(), sums.num_host_calls

    assert on_ranks(2, gathered) == [([-1.0, -1.0, 0.0], 0), ([0.0, 0.0, -2.0], 0)]


def test_calls_that_need_the_host_are_counted() -> None:
    def count(group: TensorGroup) -> int:
        sums = group.with_small_sums(NegativeSums())
        sums.all_reduce(torch.ones(4))
        sums.all_reduce(torch.ones(5))
        sums.gather_columns(torch.ones(4, 2), [2, 2])
        return sums.num_host_calls

    assert on_ranks(2, count) == [2, 2]


def test_what_fails_on_one_rank_is_raised_on_all() -> None:
    def agree(group: TensorGroup) -> list[bytes] | str:
        def told() -> bytes:
            if group.mesh.tensor_rank == failing:
                raise PeerAccessError("no memory")
            return b"rank %d" % group.mesh.tensor_rank

        try:
            return agreed(partial(group.exchange, device=torch.device("cpu")), told)
        except PeerAccessError as error:
            return str(error)

    failing = 1
    assert on_ranks(3, agree) == ["rank 1: no memory"] * 3
    failing = -1
    assert on_ranks(3, agree) == [[b"rank 0", b"rank 1", b"rank 2"]] * 3
