"""Ranks as threads of the test's own process: each with connections of its own, over Gloo as in real processes. All of
them stay open until the last rank is done, which may still connect when another one has returned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from headrace.dist.collectives import StageLink, TensorGroup, connect
from headrace.dist.mesh import Mesh
from headrace.dist.rendezvous import Rendezvous

Result = TypeVar("Result")


def on_ranks(size: int, function: Callable[[TensorGroup], Result], *, whole_experts: bool = False) -> list[Result]:
    """Calls the function on every rank at the same time; returns the results in the order of the ranks."""

    def mesh_of(rank: int) -> Mesh:
        return Mesh(rank, size, whole_experts=whole_experts)

    connected: list[TensorGroup] = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(size) as pool:
        rendezvous = Rendezvous.in_file(Path(directory) / "store")

        def run(rank: int) -> Result:
            torch.set_num_threads(1)
            with torch.inference_mode():
                group = connect(mesh_of(rank), rendezvous, "gloo").tensor
                assert group is not None
                connected.append(group)
                return function(group)

        return list(pool.map(run, range(size)))


def on_stages(size: int, function: Callable[[StageLink], Result]) -> list[Result]:
    """The same for the stages of a pipeline."""
    connected: list[StageLink] = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(size) as pool:
        rendezvous = Rendezvous.in_file(Path(directory) / "store")

        def run(stage: int) -> Result:
            link = connect(Mesh(0, 1, stage, size), rendezvous, "gloo").stages
            assert link is not None
            connected.append(link)
            return function(link)

        return list(pool.map(run, range(size)))
