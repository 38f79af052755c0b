"""The place of a process among those that compute one model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """A rank of `tensor_size` x `pipeline_size`. Tensor ranks divide the matrices of every layer; pipeline ranks, the
    stages, divide the layers. Rank 0 has the scheduler.

        2 x 2    stage 0: ranks 0 1    stage 1: ranks 2 3    hidden states go from 0 to 2 and from 1 to 3
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    whole_experts: bool = False  # tensor ranks divide the experts of a mixture, not the matrices of each

    def __post_init__(self) -> None:
        assert 0 <= self.tensor_rank < self.tensor_size
        assert 0 <= self.pipeline_rank < self.pipeline_size

    @classmethod
    def of_rank(cls, rank: int, *, tensor_size: int, pipeline_size: int, whole_experts: bool = False) -> Mesh:
        pipeline_rank, tensor_rank = divmod(rank, tensor_size)
        return cls(tensor_rank, tensor_size, pipeline_rank, pipeline_size, whole_experts)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows, columns or heads: those from `start` to before `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def __contains__(self, unit: int) -> bool:
        return self.start <= unit < self.end

    def times(self, width: int) -> Span:
        """The elements of these units, each `width` wide."""
        return Span(self.start * width, self.end * width)


def divided(num_units: int, num_parts: int) -> list[Span]:
    """Consecutive parts of nearly equal size; the first ones have one unit more where it does not divide."""
    size, num_larger = divmod(num_units, num_parts)
    starts = [index * size + min(index, num_larger) for index in range(num_parts + 1)]
    return [Span(start, end) for start, end in zip(starts[:-1], starts[1:], strict=True)]
