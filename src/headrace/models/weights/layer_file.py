"""Keeps the weights of layers in a file without a name, for those that fit neither on the GPU nor in host memory.

A layer is written through a mapping when it is loaded, and read back with plain reads, past the page cache where the
file system allows it: steps read the layers in turn, so a cache that is smaller than the file would never have the next
one. The file is gone when its last user is, whatever ends the process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import ConfigError

PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)  # bytes: layers begin at multiples, as direct reads and mappings require
_GIB = 2**30


class LayerFile:
    """Owns the file and knows where each layer is in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._end = 0
        self._starts: dict[int, int] = {}  # by address of the mapping
        self.layers: list[Tensor] = []  # mappings, in the order in which they were allocated
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, prefix="headrace-")  # noqa: SIM115 (open while it lives)
        except OSError as error:
            raise ConfigError(f"cpu_offload_path={str(directory)!r} cannot be written: {error}") from error
        self._reads = _without_cache(self._file.fileno())
        weakref.finalize(self, os.close, self._reads)
        weakref.finalize(self, self._file.close)

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocates [bytes] uint8, mapped from the file. Disk space is taken now, so that writing cannot fail later."""
        size = padded(num_bytes)
        try:
            os.posix_fallocate(self._file.fileno(), self._end, size)
        except OSError as error:
            raise ConfigError(
                f"cpu_offload_path={str(self._directory)!r} has no room for another {size / _GIB:.2f} GiB of weights "
                f"after {self._end / _GIB:.2f} GiB ({error.strerror}); free space, or raise the free host memory"
            ) from error
        mapped = torch.frombuffer(mmap.mmap(self._file.fileno(), size, offset=self._end), dtype=torch.uint8)
        self._starts[mapped.data_ptr()] = self._end
        self._end += size
        self.layers.append(mapped[:num_bytes])
        return self.layers[-1]

    def write_back(self) -> None:
        """Waits until all layers are on the disk: their pages can then be dropped, and direct reads see them."""
        os.fsync(self._file.fileno())

    def read(self, layer: Tensor, buffer: Tensor) -> None:
        """Reads a layer into a buffer that begins at a page and has room for its last page."""
        start, size = self._starts[layer.data_ptr()], padded(layer.nbytes)
        view, done = buffer.numpy().data[:size], 0
        while done < size:
            num_read = os.preadv(self._reads, [view[done:]], start + done)
            if num_read == 0:
                raise OSError(f"the weights file ends at byte {start + done}, and {size - done} more were written")
            done += num_read


def padded(num_bytes: int) -> int:
    """Bytes of whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def _without_cache(file: int) -> int:
    """Opens the file again for direct reads; for plain ones where the file system has no others."""
    path = f"/proc/self/fd/{file}"
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.dup(file)
