"""Ranks as threads of the test's own process: each with connections of its own, over Gloo as in real processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from headrace.dist.collectives import TensorGroup, connect
from headrace.dist.mesh import Mesh

Result = TypeVar("Result")


def on_ranks(size: int, function: Callable[[TensorGroup], Result]) -> list[Result]:
    """Calls the function on every rank at the same time; returns the results in the order of the ranks."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(size) as pool:
        store = Path(directory) / "store"

        def run(rank: int) -> Result:
            torch.set_num_threads(1)
            with torch.inference_mode():
                return function(connect(Mesh(rank, size), store, "gloo"))

        return list(pool.map(run, range(size)))
