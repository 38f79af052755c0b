"""The facts about the machine that settings depend on. Only `read_gpu`, `num_gpus` and `visible_gpus` import torch."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.hardware.gpu_topology import GpuPlace, place_of, read_gpu_topology
from headrace.hardware.host_link import HostLink, read_host_link
from headrace.hardware.system_files import ROOT, read_text
from headrace.hardware.topology import CpuTopology, read_topology

_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str
    total_memory: int  # bytes
    free_memory: int  # bytes, before the engine allocates anything
    capability: tuple[int, int]  # CUDA compute capability
    step_memory: int | None = None  # bytes that the largest step was measured to need beside weights and KV cache
    has_flash_attention: bool = True  # whether the package that the extra `gpu` installs can be loaded
    place: GpuPlace | None = None  # None: the driver does not tell its PCI address
    host_link: HostLink | None = None  # None: the machine does not tell


@dataclass(frozen=True, slots=True)
class MachineFacts:
    cpu_model: str
    num_cores: int  # that this process may use
    total_memory: int  # bytes; the container's limit where there is one
    free_memory: int  # bytes available now
    gpu: GpuFacts | None = None
    topology: CpuTopology | None = None  # None: of no machine at hand, as for plans
    num_gpus: int = 1  # that this process may use, if it has a GPU
    multiplies_packed: bool = True  # whether the CPU has the instructions of GEMMs with weights of four and eight bits


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


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
    place = _place_of_gpu()
    return GpuFacts(
        torch.cuda.get_device_name(),
        total,
        free,
        torch.cuda.get_device_capability(),
        place=place,
        host_link=None if place is None else read_host_link(place.bus_id),
    )


def _place_of_gpu() -> GpuPlace | None:
    import torch

    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    with suppress(AttributeError):  # an older torch
        return place_of(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
    topology, uuid = read_gpu_topology(), str(getattr(found, "uuid", ""))
    gpus = () if topology is None or not uuid else topology.gpus
    return next((gpu for gpu in gpus if gpu.uuid.endswith(uuid)), None)


def has_gpu_driver() -> bool:
    """Whether there is a driver of NVIDIA's, and CUDA_VISIBLE_DEVICES does not hide all of its GPUs."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not is_hidden and any(os.path.exists(path) for path in _DRIVER_FILES)


def visible_gpus() -> tuple[str, ...]:
    """The ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them. Torch is imported only if there
    is a driver, and no GPU is initialized."""
    if not any(os.path.exists(path) for path in _DRIVER_FILES):
        return ()
    import torch

    num_gpus = torch.cuda.device_count()
    ids = [text.strip() for text in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if text.strip()]
    return tuple(ids[:num_gpus] or map(str, range(num_gpus)))


def read_facts(root: Path = ROOT) -> MachineFacts:
    memory, topology = psutil.virtual_memory(), read_topology(root)
    limit = topology.limits.memory
    total = memory.total if limit is None else min(memory.total, limit.limit_bytes)
    free = memory.available if limit is None else min(memory.available, limit.free_bytes)
    cpus = _num_cpus(topology)
    return MachineFacts(
        _cpu_model(root), cpus, total, free, topology=topology, multiplies_packed=_multiplies_packed(root)
    )


def _num_cpus(topology: CpuTopology) -> int:
    """Logical CPUs, or as many as the quota of CPU time feeds."""
    quota, num_cpus = topology.limits.cpu_quota, len(topology.cpus)
    return num_cpus if quota is None else max(1, min(num_cpus, round(quota)))


def _multiplies_packed(root: Path) -> bool:
    """Whether the CPU is an x86 with AVX2 and what came with it, as the kernels need it (`kernels/cpu/panels.py`)."""
    flags = _cpu_field(root, "flags")
    return platform.machine() in ("x86_64", "AMD64") and (
        flags is None or {"avx2", "fma", "f16c"} <= set(flags.split())
    )


def is_amd_with_avx512(root: Path = Path("/")) -> bool:
    flags = _cpu_field(root, "flags") or ""
    return _cpu_field(root, "vendor_id") == "AuthenticAMD" and "avx512f" in flags.split()


def _cpu_field(root: Path, name: str) -> str | None:
    """What /proc/cpuinfo says of the first CPU."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        if line.partition(":")[0].strip() == name:
            return line.partition(":")[2].strip()
    return None


def _cpu_model(root: Path) -> str:
    return _cpu_field(root, "model name") or platform.processor() or platform.machine()
