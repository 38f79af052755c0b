"""Facts about this machine (cores, memory, GPU), its load during a run, and returning memory to the system.

    facts.py                       what settings depend on        describe.py   machine, versions, commit, for records
    nvml.py, process_usage.py      GPUs and processes over time (sampler.py)      memory.py     returns unused memory
    gpu_monitor.py                 the figures of GPUs now, for metrics and jobs
    topology.py, cgroups.py        physical cores, NUMA nodes and limits of this process (cpu_list.py, system_files.py)
    gpu_topology.py                NVLink, PCIe and NUMA nodes of GPUs          affinity.py   pins threads
    cuda_context.py                creates a GPU's context before torch is imported
    openmp.py                      lets torch's threads sleep soon

Only `read_gpu`, `num_gpus` and `visible_gpus` of facts.py import torch.
"""

from __future__ import annotations

from headrace.hardware.affinity import pinned_to
from headrace.hardware.facts import (
    GpuFacts,
    MachineFacts,
    has_gpu_driver,
    num_gpus,
    read_facts,
    read_gpu,
    visible_gpus,
)
from headrace.hardware.memory import keep_freed_buffers, release_unused, resident_bytes, return_large_buffers
from headrace.hardware.openmp import shorten_openmp_waits
from headrace.hardware.topology import CpuTopology

__all__ = [
    "CpuTopology",
    "GpuFacts",
    "MachineFacts",
    "has_gpu_driver",
    "keep_freed_buffers",
    "num_gpus",
    "pinned_to",
    "read_facts",
    "read_gpu",
    "release_unused",
    "resident_bytes",
    "return_large_buffers",
    "shorten_openmp_waits",
    "visible_gpus",
]
