"""Giving back what is no longer needed."""

from __future__ import annotations

import ctypes
import gc
import platform


def release_unused() -> None:
    """Return freed memory to the system: loading a model leaves tens of megabytes of it behind."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
