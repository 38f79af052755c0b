"""Copies weights from host memory to buffers on a GPU, beside the computation: a stream of its own, and events.

All of it can be captured: a copy becomes a node of the graph, with edges from the computation before it and to the one
that waits for it. The host memory must outlive the graph, so it belongs to the decoder. Only layers that come from a
disk need the host in every step, so their steps are not captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.staged_reads import StagedReads


class CopyStream:
    """The `CopyQueue` of a GPU."""

    def __init__(self, buffers: list[Tensor], reads: StagedReads | None = None) -> None:
        """`reads`: brings the layers that are on a disk; None: there are none."""
        self._buffers = buffers
        self._reads = reads
        self._device = buffers[0].device
        # PyTorch hands out 32 streams of each priority in turn: this one is then none that computes.
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._copied = [torch.cuda.Event() for _ in buffers]
        self._fence = torch.zeros(1, dtype=torch.int32, device=self._device)

    @property
    def needs_host(self) -> bool:
        return self._reads is not None

    def wait_for_computation(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: Tensor, buffer: int) -> None:
        staged = None if self._reads is None else self._reads.take(source)
        self._copy(source if staged is None else staged[: source.nbytes], buffer)
        if staged is not None and self._reads is not None:
            ended = torch.cuda.Event(blocking=True)  # the thread that reads sleeps until then
            ended.record(self._stream)
            self._reads.give_back(staged, ended.synchronize)

    def _copy(self, source: Tensor, buffer: int) -> None:
        with torch.cuda.stream(self._stream):
            self._buffers[buffer][: source.nbytes].copy_(source, non_blocking=True)
        self._copied[buffer].record(self._stream)

    def let_computation_wait(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])
        # A kernel with programmatic dependent launch may read its weights while the kernel before it still runs
        # (`kernels/gpu/few_rows.py`). That kernel is now a plain one, which starts after the copy.
        self._fence.add_(1)


def zeros_on(device: torch.device, number: int, num_bytes: int) -> list[Tensor]:
    """Buffers of so many bytes each. They begin as zeros: what warms up kernels may read them."""
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(number)]
