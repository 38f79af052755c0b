"""What the ranks of a group compute together. Every rank makes the same calls in the same order.

    all_reduce      the sum of all ranks' tensors, in place; by far the most frequent: twice per layer
    gather_columns  [T, C] of each rank -> [T, sum of C] on all ranks, bitwise equal everywhere
    maxima          the largest of each number over all ranks

Gloo connects CPUs over TCP on the loopback interface and needs no shared memory. NCCL connects GPUs; its calls are
queued on the stream, and a CUDA graph can hold them. `all_reduce` is the place where another transport for small
messages would be chosen, by their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from headrace.dist.mesh import Mesh

Backend = Literal["gloo", "nccl"]

COLLECTIVE_TIMEOUT_S = 60.0  # ranks wait for plans outside of collectives, so one that takes this long hangs
_LOOPBACK = "127.0.0.1"


class TensorGroup:
    """Owns the connections of one rank to the others. Used by one thread; `abort` by any."""

    def __init__(self, mesh: Mesh, process_group: Any, backend: Backend) -> None:
        self.mesh = mesh
        self.backend = backend
        self._group = process_group

    @property
    def fits_in_graphs(self) -> bool:
        """Whether a CUDA graph can hold its calls."""
        return self.backend == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds up x over all ranks, in place, and returns it."""
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Puts the columns of all ranks side by side. `widths` are the ranks' numbers of columns."""
        widest = max(widths)
        ours = x.contiguous() if x.shape[1] == widest else pad(x, (0, widest - x.shape[1]))
        gathered = ours.new_empty(len(widths) * ours.shape[0], widest)
        self._group._allgather_base(gathered, ours).wait()
        parts = gathered.view(len(widths), ours.shape[0], widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def maxima(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The largest of each value over all ranks, so that all decide alike."""
        x = torch.tensor(values, dtype=torch.float32, device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([x], options).wait()
        found: list[float] = x.tolist()
        return found

    def abort(self) -> None:
        """Ends calls that wait for a rank that has gone. With Gloo the end of that process is enough."""
        if self.backend == "nccl":
            self._group.abort()


def connect(mesh: Mesh, store_path: Path, backend: Backend, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> TensorGroup:
    """Connects this rank with the others, which must do the same. They find each other by the file at `store_path`."""
    from torch._C._distributed_c10d import FileStore

    store = FileStore(str(store_path), mesh.tensor_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    group = (_nccl if backend == "nccl" else _gloo)(store, mesh, timedelta(seconds=timeout_s))
    return TensorGroup(mesh, group, backend)


def _gloo(store: Any, mesh: Mesh, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # By default Gloo listens on the address of the host's name, which other machines can reach.
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    return gloo(store, mesh.tensor_rank, mesh.tensor_size, options)


def _nccl(store: Any, mesh: Mesh, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, mesh.tensor_rank, mesh.tensor_size, options)
