"""Hidden states between the stages of a pipeline on GPUs.

    stage before ══▶ pull ─▶ inbox ─▶ [graph: receive ─▶ layers ─▶ send] ─▶ outbox ─▶ push ══▶ stage after

A CUDA graph holds `receive` and `send`, which are copies from and to fixed memory. `pull` and `push` are called before
and after a step, with its number of tokens: without the padding of a graph, since stages may choose graphs of different
sizes. NCCL's calls are queued on the stream. Gloo, for stages that share a GPU, goes by pinned memory: `pull` waits for
the stage before, and a thread sends once the step is done.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from headrace.dist.collectives import StageLink

_NUM_SENDS = 2  # at a time: a step may be pushed while the one before is sent
_MORE_ROWS = 128  # that a graph may have above the largest step


class DeviceStageLink(StageLink):
    """The connections of a rank whose stage runs on a GPU. Used by one thread; `abort` by any."""

    def __init__(self, link: StageLink) -> None:
        super().__init__(link.mesh, link._group, link.backend)
        self._inbox: Tensor | None = None  # [rows, H]
        self._outbox: Tensor | None = None  # [rows, H]
        self._sender: _NcclSender | _GlooSender | None = None

    def receive(self, out: Tensor) -> Tensor:
        """Copies the tokens that `pull` has received."""
        if self._inbox is None:
            self._inbox = _rows_like(out)
        return out.copy_(self._inbox[: len(out)])

    def send(self, x: Tensor) -> None:
        """Copies the tokens that `push` will send."""
        if self._outbox is None:
            self._outbox = _rows_like(x)
        self._outbox[: len(x)].copy_(x)

    def pull(self, num_tokens: int) -> None:
        """Receive the tokens of a step from the stage before; nothing on the first stage."""
        if self.mesh.is_first_stage:
            return
        assert self._inbox is not None  # the largest step was measured before
        rows = self._inbox[:num_tokens]
        source = self.mesh.pipeline_rank - 1
        if self.backend == "nccl":
            self._group.recv([rows], source, 0).wait()  # on the stream
            return
        received = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        self._group.recv([received], source, 0).wait()
        rows.copy_(received, non_blocking=True)  # the allocator keeps pinned memory until the copy is done

    def push(self, num_tokens: int) -> None:
        """Send the tokens of a step to the stage after; nothing on the last stage."""
        if self.mesh.is_last_stage:
            return
        assert self._outbox is not None
        if self._sender is None:
            kind = _NcclSender if self.backend == "nccl" else _GlooSender
            self._sender = kind(self._group, self.mesh.pipeline_rank + 1, self._outbox)
        self._sender.send(self._outbox[:num_tokens])

    def flush(self) -> None:
        if self._sender is not None:
            self._sender.wait()


class _NcclSender:
    """Sends on NCCL's stream, while the next step computes. The host never waits."""

    def __init__(self, group: Any, target: int, outbox: Tensor) -> None:
        self._group, self._target = group, target
        self._memory = deque(torch.empty_like(outbox) for _ in range(_NUM_SENDS))
        self._works: deque[Any] = deque()

    def send(self, x: Tensor) -> None:
        if len(self._works) == _NUM_SENDS:
            self._works.popleft().wait()  # the stream waits: its memory is used again
        rows = self._memory[0][: len(x)].copy_(x)
        self._memory.rotate(-1)
        self._works.append(self._group.send([rows], self._target, 0))

    def wait(self) -> None:
        while self._works:
            self._works.popleft().wait()


class _GlooSender:
    """Sends from pinned memory, on one thread, so that steps arrive in their order."""

    def __init__(self, group: Any, target: int, outbox: Tensor) -> None:
        self._group, self._target = group, target
        self._memory = deque(
            torch.empty(outbox.shape, dtype=outbox.dtype, pin_memory=outbox.is_cuda) for _ in range(_NUM_SENDS)
        )
        self._thread = ThreadPoolExecutor(1, "headrace-stage-sender")
        self._sending: deque[Future[None]] = deque()

    def send(self, x: Tensor) -> None:
        if len(self._sending) == _NUM_SENDS:
            self._sending.popleft().result()
        rows = self._memory[0][: len(x)].copy_(x, non_blocking=True)
        self._memory.rotate(-1)
        self._sending.append(self._thread.submit(self._send, rows, _recorded(x)))

    def _send(self, rows: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        self._group.send([rows], self._target, 0).wait()

    def wait(self) -> None:
        while self._sending:
            self._sending.popleft().result()


def _recorded(x: Tensor) -> torch.cuda.Event | None:
    """After what was queued for x; None on a CPU, which has done it."""
    if not x.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _rows_like(x: Tensor) -> Tensor:
    """Memory for the largest step. The first one is: it is measured before graphs are captured."""
    with torch.inference_mode(False):
        return torch.zeros(len(x) + _MORE_ROWS, x.shape[1], dtype=x.dtype, device=x.device)
