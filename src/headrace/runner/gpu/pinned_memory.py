"""Host memory that a GPU copies from and to at the full rate of the bus, and that its kernels can read and write."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError

_GIB = 2**30


def pinned_memory(num_bytes: int, *, setting: str = "cpu_offload_gb") -> Tensor:
    """Allocates [bytes] uint8 of zeros, as `setting` asks for. PyTorch's own allocator of pinned memory would round the
    size up to a power of two."""
    try:
        memory = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise _refused(num_bytes, setting, str(error)) from error
    run = np.frombuffer(memory, np.uint8)
    address, runtime = run.ctypes.data, torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        raise _refused(num_bytes, setting, f"CUDA error {code}")
    # At the end of the process the driver has unregistered it already. Before that, `memory` is kept until it is
    # unregistered: at its own end it is unmapped first, and CUDA fails later, in a call that has nothing to do with it.
    weakref.finalize(run, _unregister, runtime, address, memory).atexit = False
    return torch.from_numpy(run)


def _unregister(runtime: Any, address: int, memory: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)


def _refused(num_bytes: int, setting: str, why: str) -> ConfigError:
    return ConfigError(
        f"{num_bytes / _GIB:.2f} GiB of host memory for {setting} cannot be pinned ({why}); lower {setting}, or raise "
        "the limit of locked memory (ulimit -l, or the container's memory)"
    )
