"""Measures what a device reaches: the bandwidth of a large copy and the rate of a large GEMM.

Each runs for a tenth of a second or more, since GPUs lower their clock under load. On a GPU they use memory that the
engine has reserved for steps, none of which runs meanwhile; a smaller size is taken where a large one does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from headrace.config import Quantization
from headrace.kernels import ops
from headrace.kernels.quantized import quantize

GPU_COPY_BYTES = (1 << 30, 1 << 28, 1 << 26)  # a GPU's L2 cache holds up to 50 MB
CPU_COPY_BYTES = (1 << 28, 1 << 26)
GPU_GEMM_SIZES = (8192, 4096, 2048)
CPU_GEMM_SIZES = (1024,)
MIN_SECONDS = 0.1
CPU_PARTS = 8
SPARE_BYTES = 1 << 30  # of the GPU, left to others where nothing is reserved


class Probe(NamedTuple):
    """What was measured. None: there was no memory for it."""

    bandwidth: float | None  # bytes per second, read and written
    gemm_rate: float | None  # FLOP/s
    note: str


def measure_ceilings(device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None) -> Probe:
    """Measure a device, with the GEMM of weights that are quantized so. Takes about half a second; nothing else may run
    on it."""
    is_gpu = device.type == "cuda"
    with torch.inference_mode():
        copies = _fitting(GPU_COPY_BYTES, lambda size: 2 * size, device) if is_gpu else CPU_COPY_BYTES
        bandwidth, num_bytes = _first_that_fits(copies, lambda size: _copy_rate(size, device))
        gemms = _fitting(GPU_GEMM_SIZES, lambda size: 8 * size**2, device) if is_gpu else CPU_GEMM_SIZES
        kind = _kind_of_gemm(device, quantization)
        rate, size = _first_that_fits(gemms, lambda size: _gemm_rate(size, device, dtype, kind))
    name = str(dtype).removeprefix("torch.") if kind is None else kind.upper()
    copied = "no copy fitted" if bandwidth is None else f"copy of {num_bytes >> 20} MiB"
    multiplied = "no GEMM fitted" if rate is None else f"{name} GEMM of {size} x {size} x {size}"
    return Probe(bandwidth, rate, f"{copied}, {multiplied}")


def _fitting(sizes: tuple[int, ...], num_bytes: Callable[[int], int], device: torch.device) -> tuple[int, ...]:
    """The sizes that fit into memory that torch holds and nobody uses; if none does, into free memory."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    held = tuple(size for size in sizes if num_bytes(size) <= unused)
    free = torch.cuda.mem_get_info(device)[0] - SPARE_BYTES
    return held or tuple(size for size in sizes if num_bytes(size) <= free)


def _first_that_fits(sizes: tuple[int, ...], measure: Callable[[int], float]) -> tuple[float | None, int]:
    for size in sizes:
        try:
            return measure(size), size
        except torch.OutOfMemoryError:
            pass
    return None, 0


def _copy_rate(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds_of(lambda: target.copy_(source), device)


def _kind_of_gemm(device: torch.device, quantization: Quantization | None) -> Quantization | None:
    """Other kinds are measured with a GEMM in the type of the activations."""
    return quantization if quantization == ("fp8" if device.type == "cuda" else "int8") else None


def _gemm_rate(size: int, device: torch.device, dtype: torch.dtype, kind: Quantization | None) -> float:
    # Random values: a GPU multiplies zeros faster, since they cost less power.
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    if device.type != "cuda":  # as steps multiply
        packed = ops.pack_linear(b) if kind is None else ops.pack_quantized(quantize(b, kind), None, dtype)
        return 2 * size**3 / _seconds_of(lambda: packed(a), device)
    if kind is None:
        out = torch.empty_like(a)
        return 2 * size**3 / _seconds_of(lambda: torch.mm(a, b, out=out), device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    rows = torch.ones(size, 1, dtype=torch.float32, device=device)
    columns = torch.ones(1, size, dtype=torch.float32, device=device)
    return (
        2
        * size**3
        / _seconds_of(lambda: torch._scaled_mm(left, right, rows, columns, out_dtype=torch.bfloat16), device)
    )


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """On a GPU, mean seconds of a call in the second of two halves, each at least MIN_SECONDS / 2 long. On a CPU, whose
    cores other programs may use meanwhile, the best mean of several parts."""
    _timed(call, 2, device)  # loads kernels
    once = _timed(call, 3, device) / 3
    if device.type != "cuda":
        count = max(1, round(MIN_SECONDS / CPU_PARTS / max(once, 1e-6)))
        return min(_timed(call, count, device) / count for _ in range(CPU_PARTS))
    count = max(3, round(MIN_SECONDS / 2 / max(once, 1e-6)))
    _timed(call, count, device)
    return _timed(call, count, device) / count


def _timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - started
