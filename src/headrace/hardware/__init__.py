"""Facts about this machine (cores, memory, GPU), and returning memory to the system."""

from __future__ import annotations

from headrace.hardware.facts import GpuFacts, MachineFacts, read_facts, read_gpu
from headrace.hardware.memory import release_unused, return_large_buffers

__all__ = ["GpuFacts", "MachineFacts", "read_facts", "read_gpu", "release_unused", "return_large_buffers"]
