"""Small sums over the ranks through memory that they share: `dist/peer_memory.py` with the kernel `gpu/peer_sum.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headrace.dist.collectives import COLLECTIVE_TIMEOUT_S, Groups
from headrace.dist.peer_memory import PeerAccessError, PeerMemory, agreed, share_memory
from headrace.kernels.gpu import peer_sum

CHECK_TIMEOUT_S = 20.0  # ranks compile the kernel at the same time, but not at the same speed

_log = logging.getLogger(__name__)


class PeerSums:
    """See `dist.collectives.SmallSums`."""

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank

    def takes(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return dtype in peer_sum.DTYPES and math.prod(shape) * dtype.itemsize <= peer_sum.MAX_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        peer_sum.sum_over_peers(x, self._memory.addresses, self._rank, timeout_s=COLLECTIVE_TIMEOUT_S)
        return x

    def abort(self) -> None:
        self._memory.end_waits()

    def check(self, size: int) -> bytes:
        """Adds up known numbers, twice in each half of the memory, and so compiles the kernel for usual sizes."""
        for numel in (4096, 10_000, 13, 13):
            x = torch.arange(numel, dtype=torch.float32, device="cuda").add_(self._rank * 1000.0)
            expected = torch.arange(numel, dtype=torch.float32).mul_(size).add_(sum(range(size)) * 1000.0)
            peer_sum.sum_over_peers(x, self._memory.addresses, self._rank, timeout_s=CHECK_TIMEOUT_S, traps=False)
            if not torch.equal(x.cpu(), expected):
                raise PeerAccessError(f"the sum of {numel} numbers was wrong in a check")
        return b""


def with_peer_sums(groups: Groups) -> Groups:
    """Connects the tensor ranks' memory and checks sums. Where it cannot be shared, the groups stay as they are, after
    one line in the log."""
    group = groups.tensor
    if group is None:
        return groups
    rank, size = group.mesh.tensor_rank, group.mesh.tensor_size
    exchange = partial(group.exchange, device=torch.device("cuda"))
    try:
        memory = share_memory(exchange, rank, num_bytes=peer_sum.memory_bytes(size))
        sums = PeerSums(memory, rank)
        agreed(exchange, lambda: sums.check(size))
    except PeerAccessError as error:
        if rank == 0:
            _log.warning("small sums over the ranks do not use peer memory: %s", error)
        return groups
    return replace(groups, tensor=group.with_small_sums(sums))
