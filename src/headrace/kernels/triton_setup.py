"""What Triton does once per process before the first kernel, begun earlier.

- It hashes itself, a library of 400 MB, because compiled kernels are looked up by that too.
- It loads a C module that calls CUDA's driver, which the first start on a machine compiles.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import Any

_HASH_MODULES = ("triton.runtime.cache", "triton.compiler.compiler")  # where versions of Triton have it


def hash_triton() -> None:
    """Let Triton compute its hash, if it has not."""
    _hash_function()()


def set_up_meanwhile(done: Callable[[str], None], *, loads_driver: bool = True) -> Thread | None:
    """Do it on a thread, which leaves the interpreter to others while it hashes or waits for the C compiler. `done`
    gets what has been done; `loads_driver`: this process will launch kernels. None: there is no Triton."""
    try:
        nvidia = import_module("triton.backends.nvidia.driver")
    except ImportError:
        return None
    compute_hash = _hash_function()  # imported here: two threads that import packages could wait for each other

    def run() -> None:
        compute_hash()
        done("Triton hashed")
        if loads_driver:
            with suppress(
                RuntimeError, OSError, AssertionError, subprocess.CalledProcessError
            ):  # the first kernel says
                nvidia.CudaUtils()
            done("Triton's driver module loaded")

    thread = Thread(target=run, name="headrace-triton", daemon=True)
    thread.start()
    return thread


def _hash_function() -> Callable[[], Any]:
    for module in _HASH_MODULES:
        found: Callable[[], Any] | None = getattr(import_module(module), "triton_key", None)
        if found is not None:
            return found
    return lambda: None  # a version that looks kernels up in another way
