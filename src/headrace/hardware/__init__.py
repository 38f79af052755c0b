"""Facts about this machine (cores, memory, GPU), its load during a run, and returning memory to the system.

    facts.py                       what settings depend on        describe.py   machine, versions, commit, for records
    nvml.py, process_usage.py      GPUs and processes over time (sampler.py)      memory.py     returns unused memory
    gpu_monitor.py                 the figures of GPUs now, for metrics and jobs

Only `read_gpu`, `num_gpus` and `visible_gpus` of facts.py import torch.
"""

from __future__ import annotations

from headrace.hardware.facts import GpuFacts, MachineFacts, num_gpus, read_facts, read_gpu, visible_gpus
from headrace.hardware.memory import release_unused, resident_bytes, return_large_buffers

__all__ = [
    "GpuFacts",
    "MachineFacts",
    "num_gpus",
    "read_facts",
    "read_gpu",
    "release_unused",
    "resident_bytes",
    "return_large_buffers",
    "visible_gpus",
]
