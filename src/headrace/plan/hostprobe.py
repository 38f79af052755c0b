"""Measures this machine's memory bandwidth and float32 rate with NumPy, in about half a second. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

import numpy as np

from headrace.hardware import read_facts
from headrace.hardware.facts import is_amd_with_avx512
from headrace.plan.gpus import Gpu, cpu

_COPY_BYTES = 32 << 20  # read and written: more than the caches of most CPUs hold
_MATRIX_SIZE = 64  # so small that NumPy's BLAS uses one thread
_MATRIX_ROUNDS = 256
_SECONDS_EACH = 0.15
# On AMD's processors NumPy's BLAS multiplies 256 bits at once, and Headrace's kernels 512 where there is AVX-512.
_WIDER = 2.0


@dataclass(frozen=True, slots=True)
class HostRates:
    bandwidth: float  # bytes/s of one thread, read and written together
    flops: float  # float32 FLOP/s of GEMMs, all cores together, with the widest instructions


def measure_host(num_cores: int, seconds_each: float = _SECONDS_EACH) -> HostRates:
    """What this machine does without other load: one thread is timed by its own CPU time, GEMMs times the cores."""
    source = np.ones(_COPY_BYTES // 4, dtype=np.float32)
    target = np.zeros_like(source)
    left = np.full((_MATRIX_SIZE, _MATRIX_SIZE), 0.5, dtype=np.float32)
    right, out = left.copy(), np.empty_like(left)

    def multiply() -> None:
        for _ in range(_MATRIX_ROUNDS):
            np.matmul(left, right, out=out)

    copying = _best_of(lambda: np.copyto(target, source), seconds_each)
    multiplying = _best_of(multiply, seconds_each) / _MATRIX_ROUNDS
    wider = _WIDER if is_amd_with_avx512() else 1.0
    return HostRates(2 * source.nbytes / copying, wider * num_cores * 2 * _MATRIX_SIZE**3 / multiplying)


def this_cpu(*, bandwidth: float | None = None, flops: float | None = None, price: float | None = None) -> Gpu:
    """The CPU of this machine; rates that are not given are measured."""
    facts = read_facts()
    if bandwidth is None or flops is None:
        measured = measure_host(facts.num_cores)
        bandwidth, flops = bandwidth or measured.bandwidth, flops or measured.flops
    return cpu(
        bandwidth=bandwidth, flops=flops, memory_bytes=facts.free_memory, title=f"CPU: {facts.cpu_model}", price=price
    )


def _best_of(work: Callable[[], object], seconds: float) -> float:
    work()  # pages are mapped
    best, until = float("inf"), thread_time() + seconds
    while thread_time() < until:
        started = thread_time()
        work()
        best = min(best, thread_time() - started)
    return best
