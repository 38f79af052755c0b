from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import LayerCache
from tests.kernels.places import Place, cases


def caches(place: Place, num_layers: int, *shape: int, dtype: torch.dtype | None = None) -> list[LayerCache]:
    def side() -> Tensor:
        return place.randn(*shape).to(dtype or place.dtype)

    return [LayerCache(side(), side()) for _ in range(num_layers)]


def sides_of(layers: list[LayerCache]) -> list[Tensor]:
    return [side for cache in layers for side in cache.raw_sides]


@cases(
    "num_layers shape num_copied",
    gpu=[(32, (40, 8, 16, 128), 24), (3, (9, 2, 16, 24), 5), (2, (9, 1, 1, 8), 1)],
    interpreted=[(3, (9, 2, 4, 24), 5)],
)
def test_blocks_go_to_the_host_and_come_back_to_other_blocks(
    place: Place, num_layers: int, shape: tuple[int, ...], num_copied: int
) -> None:
    from headrace.kernels.gpu import block_transfer

    layers = caches(place, num_layers, *shape)
    sides = sides_of(layers)
    before = [side.clone() for side in sides]
    words = sides[0].shape[1]
    addresses = torch.tensor([side.data_ptr() for side in sides], device=place.device)
    rows = torch.zeros(num_copied + 3, words * len(sides), dtype=torch.int64, pin_memory=place.device == "cuda")
    numbers = torch.randperm(shape[0])[:num_copied]
    blocks, places = numbers.to(place.device), torch.randperm(num_copied + 3)[:num_copied].to(place.device)
    block_transfer.copy_blocks_to_rows(addresses, words, blocks, rows, places)
    others = blocks.flip(0)
    block_transfer.copy_rows_to_blocks(addresses, words, others, rows, places)
    if place.device == "cuda":
        torch.cuda.synchronize()
    expected = torch.zeros_like(rows)
    reference.copy_blocks_to_rows([side.cpu() for side in before], numbers, expected, places.cpu())
    assert torch.equal(rows, expected)
    for side, old in zip(sides, before, strict=True):
        old[others] = old[blocks]
        assert torch.equal(side, old)


def test_the_reference_brings_back_what_it_took() -> None:
    layers = [LayerCache(torch.randn(6, 2, 4, 8).transpose(2, 3), torch.randn(6, 2, 4, 8)) for _ in range(2)]
    sides = sides_of(layers)
    rows = torch.zeros(3, sum(side.shape[1] for side in sides), dtype=torch.int64)
    kept = [side[[4, 1]].clone() for side in sides]
    reference.copy_blocks_to_rows(sides, torch.tensor([4, 1]), rows, torch.tensor([2, 0]))
    for side in sides:
        side.zero_()
    reference.copy_rows_to_blocks(sides, torch.tensor([0, 5]), rows, torch.tensor([2, 0]))
    for side, old in zip(sides, kept, strict=True):
        assert torch.equal(side[[0, 5]], old)
        assert not side[1:5].any()


def test_latents_are_copied_once_and_eight_bits_are_bytes() -> None:
    latents = LayerCache.of_latents(torch.zeros(5, 1, 16, 40), 32)
    assert [side.shape for side in latents.raw_sides] == [(5, 16 * 40 // 2)]
    eight_bits = torch.zeros(5, 2, 16, 64).to(torch.float8_e4m3fn)
    assert [side.shape for side in LayerCache(eight_bits, eight_bits.clone()).raw_sides] == [(5, 2 * 16 * 64 // 8)] * 2
