"""The sum over ranks in peer memory, on one device: the halves of the ranks' kernels run one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.places import GPU, Place, cases


class Ranks:
    """The memory of several ranks in one process."""

    def __init__(self, place: Place, size: int) -> None:
        from headrace.kernels.gpu import peer_sum

        self.memories = [
            torch.zeros(peer_sum.memory_bytes(size), dtype=torch.uint8, device=place.device) for _ in range(size)
        ]
        self.end = torch.zeros(1, dtype=torch.int32, device=place.device)
        addresses = [memory.data_ptr() for memory in (*self.memories, self.end)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=place.device)

    def call(self, x: Tensor, rank: int, **halves: bool) -> None:
        from headrace.kernels.gpu import peer_sum

        peer_sum.sum_over_peers(x, self.addresses, rank, timeout_s=2.0, traps=False, **halves)

    def sum(self, parts: list[Tensor]) -> list[Tensor]:
        """The last rank runs its whole kernel at once: it finds the parts of all others."""
        results = [part.clone() for part in parts]
        *others, last = range(len(parts))
        for rank in others:
            self.call(results[rank], rank, sums=False)
        self.call(results[last], last)
        for rank in others:
            self.call(results[rank], rank, pushes=False)
        return results


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@cases(
    "shapes size",
    gpu=[([(64, 4096), (1, 4096), (3, 7), (77, 96), (64, 4096)], 2), ([(16, 1024), (5, 2)], 8)],
    interpreted=[([(3, 2048), (1, 96), (3, 7), (2, 2048), (3, 2048)], 3)],
)
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(
    place: Place, shapes: list[tuple[int, ...]], size: int
) -> None:
    """Calls of other sizes in between use fewer chunks: each chunk counts its own calls."""
    ranks = Ranks(place, size)
    for shape in shapes:
        parts = [place.randn(*shape) for _ in range(size)]
        expected = sum_in_order(parts)
        assert all(torch.equal(found, expected) for found in ranks.sum(parts))


@pytest.mark.gpu
def test_ranks_at_the_same_time_get_the_same_sums() -> None:
    """Two streams of one GPU: the kernels of both ranks run together and wait for each other."""
    ranks, streams = Ranks(GPU, 2), [torch.cuda.Stream() for _ in range(2)]
    ranks.sum([GPU.randn(64, 4096) for _ in range(2)])  # compiles: no rank may wait for that
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(1000):
        parts = [GPU.randn(1 + number % 64, 4096) for _ in range(2)]
        results = [part.clone() for part in parts]
        for rank, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ranks.call(results[rank], rank)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        wrong += sum((found != sum_in_order(parts)).any() for found in results)
    assert wrong.item() == 0


@cases("", gpu=[()], interpreted=[()])
def test_a_wait_for_a_rank_that_has_gone_ends_when_it_is_told_to(place: Place) -> None:
    ranks = Ranks(place, 2)
    ranks.end.fill_(1)
    part = torch.ones(16, device=place.device)
    ranks.call(part, 0)  # rank 1 has not called it
    assert part.tolist() == [1.0] * 16


@pytest.mark.gpu
def test_a_wait_ends_after_its_time() -> None:
    part = torch.ones(16, device="cuda")
    Ranks(GPU, 2).call(part, 0)
    assert part.tolist() == [1.0] * 16
