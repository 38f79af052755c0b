"""The facts about the machine that settings depend on. Only `read_gpu`, `num_gpus` and `visible_gpus` import torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str
    total_memory: int  # bytes
    free_memory: int  # bytes, before the engine allocates anything
    capability: tuple[int, int]  # CUDA compute capability
    step_memory: int | None = None  # bytes that the largest step was measured to need beside weights and KV cache


@dataclass(frozen=True, slots=True)
class MachineFacts:
    cpu_model: str
    num_cores: int  # that this process may use
    total_memory: int  # bytes; the container's limit where there is one
    free_memory: int  # bytes available now
    gpu: GpuFacts | None = None
    num_gpus: int = 1  # that this process may use, if it has a GPU


def num_gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def read_gpu() -> GpuFacts | None:
    """The first GPU that torch sees, if any."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return GpuFacts(torch.cuda.get_device_name(), total, free, torch.cuda.get_device_capability())


def visible_gpus() -> tuple[str, ...]:
    """The ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them. Torch is imported only if there
    is a driver, and no GPU is initialized."""
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg")):
        return ()
    import torch

    num_gpus = torch.cuda.device_count()
    ids = [text.strip() for text in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if text.strip()]
    return tuple(ids[:num_gpus] or map(str, range(num_gpus)))


def read_facts() -> MachineFacts:
    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    total = min(memory.total, limit) if limit else memory.total
    free = min(memory.available, max(0, limit - used)) if limit else memory.available
    return MachineFacts(_cpu_model(), _num_cores(), total, free)


def _num_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _container_memory() -> tuple[int, int]:
    """Memory limit and use of the control group in bytes, or zeros if there is no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text().strip()
    except OSError:
        return 0, 0
    return (0, 0) if limit == "max" else (int(limit), int(used))
