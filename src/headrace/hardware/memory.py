"""This process' memory: how much it has, and returning what is unused to the system."""

from __future__ import annotations

import ctypes
import gc
import platform

import psutil

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES = 4 << 20


def return_large_buffers() -> None:
    """Make freed large buffers return to the system, instead of leaving holes in the heap."""
    if _has_glibc():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


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
