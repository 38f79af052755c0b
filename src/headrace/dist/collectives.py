"""What ranks compute together, and the hidden states that go from stage to stage.

Every rank of a tensor group makes the same calls in the same order.

    all_reduce      the sum of all ranks' tensors, in place; by far the most frequent: twice per layer
    exchange        a short message of each rank to all, at the start
    gather_columns  [T, C] of each rank -> [T, sum of C] on all ranks, bitwise equal everywhere
    maxima          the largest of each number over all ranks

Gloo connects CPUs over TCP, inside a node on the loopback interface, and needs no shared memory. NCCL connects GPUs;
its calls are queued on the stream, and a CUDA graph can hold them. Small sums on GPUs take another way where there is
one: through memory that the ranks share, in one kernel (`SmallSums`), which a CUDA graph can hold too.

A stage sends while it computes the next micro-batch: at most one send waits for its receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.nn.functional import pad

from headrace.dist.mesh import Mesh
from headrace.dist.rendezvous import Rendezvous

Backend = Literal["gloo", "nccl"]

COLLECTIVE_TIMEOUT_S = 60.0  # ranks wait for plans outside of collectives, so one that takes this long hangs
_TAG = 0  # of messages between stages: they arrive in the order in which they are sent


class SmallSums(Protocol):
    """Another transport, for sums of small tensors."""

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Adds up x over all ranks, in place, and returns it."""

    def abort(self) -> None: ...


class TensorGroup:
    """Owns the connections of one rank to the others. Used by one thread; `abort` by any."""

    def __init__(self, mesh: Mesh, process_group: Any, backend: Backend, small_sums: SmallSums | None = None) -> None:
        self.mesh = mesh
        self.backend = backend
        self._group = process_group
        self._small_sums = small_sums  # None: all sums go over the process group
        self.num_host_calls = 0  # calls so far that need the host, so that no CUDA graph can hold them

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds up x over all ranks, in place, and returns it."""
        if self._small_sums is not None and x.is_contiguous() and self._small_sums.takes(x.shape, x.dtype):
            return self._small_sums(x)
        self._count_host_call()
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Puts the columns of all ranks side by side. `widths` are the ranks' numbers of columns."""
        if self._small_sums is not None and self._small_sums.takes((x.shape[0], sum(widths)), x.dtype):
            return self._small_sums(self._among_zeros(x, widths))
        self._count_host_call()
        widest = max(widths)
        ours = x.contiguous() if x.shape[1] == widest else pad(x, (0, widest - x.shape[1]))
        gathered = ours.new_empty(len(widths) * ours.shape[0], widest)
        self._group._allgather_base(gathered, ours).wait()
        parts = gathered.view(len(widths), ours.shape[0], widest)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _among_zeros(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """This rank's columns in their place, with zeros for those of the others: the sum over the ranks is exact."""
        start = sum(widths[: self.mesh.tensor_rank])
        whole = x.new_zeros(x.shape[0], sum(widths))
        whole[:, start : start + x.shape[1]] = x
        return whole

    def _count_host_call(self) -> None:
        self.num_host_calls += self.backend != "nccl"

    def exchange(self, message: bytes, device: torch.device) -> list[bytes]:
        """Returns the messages of all ranks. They must have the same length."""
        ours = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        gathered = self.gather_columns(ours[None], [len(message)] * self.mesh.tensor_size)
        return [bytes(part.tolist()) for part in gathered[0].split(len(message))]

    def with_small_sums(self, small_sums: SmallSums) -> TensorGroup:
        """The same connections, with another transport for small sums."""
        return TensorGroup(self.mesh, self._group, self.backend, small_sums)

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
        if self._small_sums is not None:
            self._small_sums.abort()
        if self.backend == "nccl":
            self._group.abort()


class StageLink:
    """Owns the connections of one rank to the same tensor rank of the stages before and after. Used by one thread;
    `abort` by any."""

    def __init__(self, mesh: Mesh, process_group: Any, backend: Backend) -> None:
        self.mesh = mesh
        self.backend = backend
        self._group = process_group
        self._sending: tuple[Any, Tensor] | None = None  # the last send, and what it reads

    def send(self, x: Tensor) -> None:
        """Sends a tensor to the next stage, which must not change any more. Waits only for the send before."""
        self.flush()
        self._sending = self._group.send([x], self.mesh.pipeline_rank + 1, _TAG), x

    def receive(self, out: Tensor) -> Tensor:
        """Waits for a tensor of the stage before."""
        self._group.recv([out], self.mesh.pipeline_rank - 1, _TAG).wait()
        return out

    def flush(self) -> None:
        """Waits until the next stage has what was sent."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def abort(self) -> None:
        """See `TensorGroup.abort`."""
        if self.backend == "nccl":
            self._group.abort()


@dataclass(frozen=True, slots=True)
class Groups:
    """The connections of one rank."""

    mesh: Mesh
    tensor: TensorGroup | None  # None: there is one tensor rank
    stages: StageLink | None  # None: there is one stage

    def abort(self) -> None:
        for group in (self.tensor, self.stages):
            if group is not None:
                group.abort()


def connect(mesh: Mesh, rendezvous: Rendezvous, backend: Backend) -> Groups:
    """Connects this rank with the others, which must do the same."""
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = rendezvous.open(timeout)

    def group(name: str, rank: int, size: int) -> Any:
        if size == 1:
            return None
        members = PrefixStore(name, store)
        if backend == "nccl":
            return _nccl(members, rank, size, timeout)
        return _gloo(members, rank, size, timeout, address=rendezvous.address)

    tensor = group(f"tensor-{mesh.pipeline_rank}", mesh.tensor_rank, mesh.tensor_size)
    stages = group(f"stages-{mesh.tensor_rank}", mesh.pipeline_rank, mesh.pipeline_size)
    return Groups(
        mesh,
        None if tensor is None else TensorGroup(mesh, tensor, backend),
        None if stages is None else StageLink(mesh, stages, backend),
    )


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, *, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # By default Gloo listens on the address of the host's name, which any machine can reach.
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)
