"""Sums over two ranks through shared GPU memory: real processes, which may share one GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dist.collectives import TensorGroup, connect
from headrace.dist.mesh import Mesh
from headrace.dist.rendezvous import Rendezvous

pytestmark = pytest.mark.gpu

SIZE = 2
SHAPES = [(64, 4096), (1, 4096), (3, 7), (0, 96), (33, 96)]  # the first has as many bytes as are taken
NUM_ROUNDS = 200  # of all shapes


def connected(rank: int, store: Path, num_gpus: int) -> TensorGroup:
    from headrace.runner.gpu.peer_sums import with_peer_sums

    torch.cuda.set_device(rank % num_gpus)
    group = with_peer_sums(connect(Mesh(rank, SIZE), Rendezvous.in_file(store), "gloo")).tensor
    assert group is not None and group._small_sums is not None, "the log has the reason"
    return group


def parts_of(shape: tuple[int, ...], generator: torch.Generator) -> list[torch.Tensor]:
    """The parts of all ranks: each rank knows them, since all have the same seed."""
    return [torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(SIZE)]


def expected_of(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).float().sum(0).to(torch.bfloat16)


def count_wrong_sums(rank: int, store: Path, num_gpus: int) -> int:
    group, wrong = connected(rank, store, num_gpus), torch.zeros((), dtype=torch.int64, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(NUM_ROUNDS):
        for shape in SHAPES:
            parts = parts_of(shape, generator)
            wrong += (group.all_reduce(parts[rank].clone()) != expected_of(parts)).any()
    large = torch.full((1 << 20,), float(rank + 1), device="cuda")  # too large: over the process group
    wrong += (group.all_reduce(large) != 3.0).any()
    return int(wrong)


def count_wrong_sums_in_a_graph(rank: int, store: Path, num_gpus: int) -> int:
    """Each replay adds up tensors of all shapes, and the first one again."""
    group, wrong = connected(rank, store, num_gpus), torch.zeros((), dtype=torch.int64, device="cuda")
    inputs = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in [*SHAPES, SHAPES[0]]]
    outputs = [torch.empty_like(each) for each in inputs]

    def step() -> None:
        for given, out in zip(inputs, outputs, strict=True):
            group.all_reduce(out.copy_(given))

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(NUM_ROUNDS):
        parts = [parts_of(tuple(each.shape), generator) for each in inputs]
        for given, ours in zip(inputs, parts, strict=True):
            given.copy_(ours[rank])
        graph.replay()
        for out, each in zip(outputs, parts, strict=True):
            wrong += (out != expected_of(each)).any()
    return int(wrong)


def abort_a_wait(rank: int, store: Path, num_gpus: int) -> int:
    """Rank 1 does not take part in the sum."""
    group = connected(rank, store, num_gpus)
    if rank == 0:
        group.all_reduce(torch.ones(16, device="cuda"))
        group.abort()
    torch.cuda.synchronize()
    return 0


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(SIZE, multiprocessing.get_context("spawn")) as pool:
        yield pool


def on_ranks(processes: Executor, function: Callable[..., int], **given: Any) -> list[int]:
    """Both ranks run at the same time: each waits for the other when it connects."""
    return list(processes.map(partial(function, **given), range(SIZE), timeout=100))


each_number_of_gpus = pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=pytest.mark.multi_gpu)])


@each_number_of_gpus
@pytest.mark.parametrize("count", [count_wrong_sums, count_wrong_sums_in_a_graph])
def test_all_ranks_get_the_same_sums(
    count: Callable[..., int], num_gpus: int, processes: Executor, tmp_path: Path
) -> None:
    assert on_ranks(processes, count, store=tmp_path / "store", num_gpus=num_gpus) == [0, 0]


@each_number_of_gpus
def test_a_sum_that_waits_for_another_rank_can_be_ended(num_gpus: int, processes: Executor, tmp_path: Path) -> None:
    assert on_ranks(processes, abort_a_wait, store=tmp_path / "store", num_gpus=num_gpus) == [0, 0]
