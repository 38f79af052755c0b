"""Compiles many launches at once, in forks of this process: a kernel takes a second of one core."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.kernels.gpu.launches import Launch, compile_launch

Progress = Callable[[int, int], None]  # kernels done, and their number
_POLL_S = 0.05


def compile_all(launches: Sequence[Launch], *, num_processes: int, progress: Progress) -> None:
    """Compiles into Triton's cache. The target must be set (`launches.set_target`)."""
    context = multiprocessing.get_context("fork")  # what was imported need not be imported again
    taken, done = context.Value("i", 0), context.Value("i", 0)
    size = max(1, min(num_processes, len(launches)))
    processes = [context.Process(target=_compile_next, args=(launches, taken, done, os.getpid())) for _ in range(size)]
    for process in processes:
        process.start()
    progress(shown := 0, len(launches))
    for process in processes:
        while process.is_alive():
            process.join(_POLL_S)
            if done.value > shown:
                progress(shown := done.value, len(launches))
    failed = len(launches) - done.value
    if failed:
        raise ModelError(f"{failed} of {len(launches)} kernels could not be compiled; see the messages above")


def _compile_next(launches: Sequence[Launch], taken: Any, done: Any, parent: int) -> None:
    """Compiles one launch after the other that no other process has taken, as long as the parent lives."""
    while os.getppid() == parent:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(launches):
            return
        compile_launch(launches[index])
        with done.get_lock():
            done.value += 1


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels, by its own variables. Imports no Triton."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache"


def code_digest() -> str:
    """Changes with everything that the compiled form of a kernel depends on, beside its launch."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for package in ("triton", "torch", "fa3-fwd"):
        digest.update(f"{package} {_version(package)}".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
