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
    function = _hash_function()
    if function is not None:
        function()


def set_up_meanwhile(done: Callable[[str], None]) -> Thread | None:
    """Do both on a thread, for a process with a GPU: hashing and the C compiler leave the interpreter to others. `done`
    gets what has been done. None: there is no Triton."""
    try:
        nvidia = import_module("triton.backends.nvidia.driver")
    except ImportError:
        return None
    hash_function = _hash_function()  # imported here: two threads that import packages could wait for each other

    def run() -> None:
        if hash_function is not None:
            hash_function()
        done("Triton hashed")
        with suppress(RuntimeError, OSError, AssertionError, subprocess.CalledProcessError):  # raised again when needed
            nvidia.CudaUtils()
        done("Triton's driver module loaded")

    thread = Thread(target=run, name="headrace-triton", daemon=True)
    thread.start()
    return thread


def _hash_function() -> Callable[[], Any] | None:
    for module in _HASH_MODULES:
        found: Callable[[], Any] | None = getattr(import_module(module), "triton_key", None)
        if found is not None:
            return found
    return None
