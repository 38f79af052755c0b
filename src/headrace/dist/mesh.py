"""The place of a process among those that compute one model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """`tensor_rank` of `tensor_size` ranks, which divide the matrices of every layer. Rank 0 has the scheduler."""

    tensor_rank: int = 0
    tensor_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tensor_rank < self.tensor_size

    @property
    def is_single(self) -> bool:
        return self.tensor_size == 1


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows, columns or heads: those from `start` to before `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def times(self, width: int) -> Span:
        """The elements of these units, each `width` wide."""
        return Span(self.start * width, self.end * width)


def divided(num_units: int, num_parts: int) -> list[Span]:
    """Consecutive parts of nearly equal size; the first ones have one unit more where it does not divide."""
    size, num_larger = divmod(num_units, num_parts)
    starts = [index * size + min(index, num_larger) for index in range(num_parts + 1)]
    return [Span(start, end) for start, end in zip(starts[:-1], starts[1:], strict=True)]
