"""This process' memory: how much it has, and returning what is unused to the system."""

from __future__ import annotations

import ctypes
import gc
import platform

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE_BYTES = 4 << 20
_LARGEST_KEPT_BYTES = (64 << 20, 32 << 20)  # some versions of glibc refuse the first one
_NEVER_TRIMMED = 1 << 30


def return_large_buffers() -> None:
    """Make freed large buffers return to the system, instead of leaving holes in the heap: while a model is loaded."""
    if _has_glibc():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def keep_freed_buffers() -> None:
    """Keep freed buffers for the next ones of their size: the steps of a CPU allocate the same ones again, and the
    first write to a new page takes longer than computing what is written."""
    if _has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIMMED)
        any(libc.mallopt(_M_MMAP_THRESHOLD, num_bytes) for num_bytes in _LARGEST_KEPT_BYTES)


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    return int(psutil.Process().memory_info().rss)


def release_unused() -> None:
    """Return freed memory to the system: loading a model leaves tens of megabytes behind."""
    gc.collect()
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
