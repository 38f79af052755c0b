"""Keeps glibc from giving large buffers back to the system after every step, only to fault their pages in again."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1  # numbers of mallopt(3)
_M_MMAP_MAX = -4


def keep_large_buffers() -> bool:
    """Makes freed memory stay with the process; call once, after the weights are loaded. False where it cannot.

    Without it each tensor over 32 MB is mapped, zeroed and unmapped anew: about 12 ms for 256 rows of 49,152 logits.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
