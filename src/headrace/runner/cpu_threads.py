"""The thread that runs a CPU's steps, and how many cores it uses. Each thread has a setting of its own for that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.hardware import keep_freed_buffers


def use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)


def device_thread(num_threads: int) -> ThreadPoolExecutor:
    """Starts a thread that runs one step after the other."""
    keep_freed_buffers()
    return ThreadPoolExecutor(1, "headrace-device", initializer=use_threads, initargs=(num_threads,))
