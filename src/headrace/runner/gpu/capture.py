"""Turns a step into something that is replayed: a CUDA graph, or, where a graph cannot hold it, the function itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.dist.collectives import TensorGroup


class Replay(Protocol):
    def replay(self) -> None: ...


class Captured(NamedTuple):
    graph: Replay
    result: Tensor  # fixed memory, which each replay fills


class UncapturedStep:
    """Calls the function at each replay and copies its result to where the first one was."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self.result = function()

    def replay(self) -> None:
        result = self._function()
        if result is not self.result:
            self.result.copy_(result)


@dataclass(frozen=True, slots=True)
class Capture:
    """Captures the steps of one runner. `group`: the ranks that its layers are divided over, if they are."""

    pool: Any  # of the graphs' memory
    device: torch.device
    group: TensorGroup | None = None
    is_stage: bool = False  # of a pipeline

    def model(self, function: Callable[[], Tensor]) -> Captured:
        """A step of the model, with its collectives. Over Gloo, it is a graph if all of them are small sums."""
        if self.group is None or self.group.backend == "nccl":
            return self.local(function)
        num_host_calls = self.group.num_host_calls
        step = UncapturedStep(function)
        if self.group.num_host_calls == num_host_calls:
            return self.local(function)
        return Captured(step, step.result)

    def local(self, function: Callable[[], Tensor]) -> Captured:
        """A step that needs no other rank."""
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread that asks for the state of its calls, which would end a capture that watches all threads.
        mode = "global" if self.group is None and not self.is_stage else "thread_local"
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode=mode):
            result = function()
        return Captured(graph, result)

    def agreed(self, milliseconds_by_size: Mapping[int, float]) -> dict[int, float]:
        """The times of the slowest rank: all ranks must choose the same graphs by them."""
        if self.group is None:
            return dict(milliseconds_by_size)
        slowest = self.group.maxima(list(milliseconds_by_size.values()), self.device)
        return dict(zip(milliseconds_by_size, slowest, strict=True))


def stream_after_current(device: torch.device) -> torch.cuda.Stream:
    """A new stream that begins after the current one: two sums over the ranks at the same time on one rank would mix up
    their parts, and the ranks would wait for each other for ever."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
