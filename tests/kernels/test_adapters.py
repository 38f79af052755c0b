"""The low-rank products of adapters, against those of each row computed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import cpu, reference
from headrace.kernels.gpu import adapters
from headrace.kernels.layout import AdapterRows, LowRankWeights
from tests.kernels.places import Place, cases, relative_error

NUM_ADAPTERS = 5


def weights_of(place: Place, sizes: tuple[int, ...], width: int, max_rank: int) -> LowRankWeights:
    """Adapter 3 does not change the layer; others have smaller ranks, filled up with zeros."""
    ranks = torch.tensor([max_rank, 1, max_rank // 2 + 1, 0, max_rank], dtype=torch.int32, device=place.device)
    down = place.randn(NUM_ADAPTERS, max_rank, len(sizes), width) * width**-0.5
    up = place.randn(NUM_ADAPTERS, sum(sizes), max_rank) * max_rank**-0.5
    for adapter, rank in enumerate(ranks.tolist()):
        down[adapter, rank:] = 0
        up[adapter, :, rank:] = 0
    return LowRankWeights(down, up, ranks, sizes)


def expected_of(out: Tensor, x: Tensor, weights: LowRankWeights, indexes: Tensor) -> Tensor:
    """Row by row, in float32."""
    found = out.float()
    for row, index in enumerate(indexes.tolist()):
        if index:
            small = torch.einsum("rpk,k->pr", weights.down[index - 1].float(), x[row].float())
            up = weights.up[index - 1].float().split(list(weights.piece_sizes))
            found[row] += torch.cat([part @ small[piece] for piece, part in enumerate(up)])
    return found


def check(place: Place, add: object, num_rows: int, sizes: tuple[int, ...], width: int, max_rank: int) -> None:
    torch.manual_seed(num_rows)
    weights = weights_of(place, sizes, width, max_rank)
    x, out = place.randn(num_rows, width), place.randn(num_rows, sum(sizes))
    indexes = torch.randint(0, NUM_ADAPTERS + 1, (num_rows,), dtype=torch.int32, device=place.device)
    expected = expected_of(out, x, weights, indexes)
    untouched = out[indexes == 0].clone()
    add(out, x, weights, AdapterRows.of(indexes, NUM_ADAPTERS))  # type: ignore[operator]
    assert relative_error(out, expected.to(out.dtype)) < place.error
    assert torch.equal(out[indexes == 0], untouched), "rows without an adapter stay as they are"


@cases(
    "num_rows sizes width max_rank",
    gpu=[
        (rows, sizes, width, rank)
        for rows in (1, 7, 300, 2049)
        for sizes, width, rank in (
            ((4096, 1024, 1024), 4096, 16),
            ((4096,), 14336, 64),
            ((14336, 14336), 4096, 8),
            ((96, 40), 200, 128),
        )
    ],
    interpreted=[(1, (32, 16, 16), 128, 8), (37, (48, 24), 200, 5), (20, (40,), 64, 96)],
)
def test_the_kernels_add_the_product_of_each_rows_adapter(
    place: Place, num_rows: int, sizes: tuple[int, ...], width: int, max_rank: int
) -> None:
    check(place, adapters.add_low_rank, num_rows, sizes, width, max_rank)


@pytest.mark.parametrize("add", [reference.add_low_rank, cpu.add_low_rank])
@pytest.mark.parametrize(
    ("num_rows", "sizes", "width", "max_rank"),
    [(1, (48, 24, 24), 96, 5), (20, (300, 20), 200, 16), (65, (40,), 33, 70), (400, (40,), 64, 8)],
)
def test_the_cpu_adds_the_product_of_each_rows_adapter(
    add: object, num_rows: int, sizes: tuple[int, ...], width: int, max_rank: int
) -> None:
    place = Place("cpu", "cpu", torch.float32, error=1e-5, attention_error=1e-5)
    check(place, add, num_rows, sizes, width, max_rank)


def test_a_cpu_computes_adapters_with_few_and_with_many_rows_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.adapters, "_MAX_ROWS", 4)
    place = Place("cpu", "cpu", torch.float32, error=1e-5, attention_error=1e-5)
    check(place, cpu.add_low_rank, 20, (300, 20), 200, 16)


def test_rows_are_sorted_by_adapter_and_those_without_one_come_last() -> None:
    rows = AdapterRows.of(torch.tensor([2, 0, 1, 2, 0, 1], dtype=torch.int32), 3)
    assert rows.order.tolist() == [2, 5, 0, 3, 1, 4]
    assert rows.starts.tolist() == [0, 2, 4, 4]
    assert rows.tile_ends.tolist() == [1, 2, 2]
    assert rows.kept(torch.tensor([1, 3])).order.tolist() == [1, 0]
