"""What kernels must know of a GPU's architecture, by its compute capability."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024

# The most shared memory of one program, in KiB: CUDA C++ Programming Guide, technical specifications per compute
# capability, "maximum amount of shared memory per thread block".
_SHARED_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (12, 0): 99,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of NVIDIA GPUs. `num_processors`: streaming multiprocessors of the GPU that is meant."""

    capability: tuple[int, int]
    num_processors: int = 132

    @property
    def number(self) -> int:
        """As in sm_90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def shared_memory_bytes(self) -> int:
        return _SHARED_KIB[self.capability] * KIB
