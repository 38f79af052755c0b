"""Creates the CUDA context of the first GPU before torch is imported, which takes as long and needs the interpreter.

Torch uses the primary context of a GPU: the one that exists already, then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Thread

_LIBRARY = "libcuda.so.1"


def create_context_meanwhile(done: Callable[[str], None]) -> Thread:
    """Create it on a thread. What fails here fails again in torch, which says why. `done` gets what has been done."""

    def run() -> None:
        if _create_context():
            done("CUDA context created")

    thread = Thread(target=run, name="headrace-cuda", daemon=True)
    thread.start()
    return thread


def _create_context() -> bool:
    try:
        driver = ctypes.CDLL(_LIBRARY)
        initialize, retain = driver.cuInit, driver.cuDevicePrimaryCtxRetain
    except (OSError, AttributeError):
        return False
    retain.argtypes = [ctypes.c_void_p, ctypes.c_int]
    context, first_gpu = ctypes.c_void_p(), 0
    return bool(initialize(0) == 0 and retain(ctypes.byref(context), first_gpu) == 0)
