"""Graphs for small steps with prompts, which the host could not launch kernel by kernel as fast as the GPU runs them.

A step is brought into the form of a graph of its size: places for rows of one token first, then places for prompts,
then one prompt that is nobody's, which fills the step up. A place that nobody has is zero tokens long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.spec import ModelSpec
from headrace.runner.gpu.tiles import TILE_ROWS, tiles_of
from headrace.steps import IntArray

_LADDER = ((256, 32), (1024, 64), (2048, 128))  # up to so many tokens, sizes so many tokens apart
_MOST_PROMPTS = 64
_ALIGNED = 4  # int32 numbers are 16 bytes
_LONG_CONTEXT = 8192  # tokens; the kernel of a graph reads blocks, and others are faster than that with more of them
_LAUNCHING = 0.7e-3  # seconds that the host takes for one layer, kernel by kernel; on an H200's, 2026-11-15
_COMPUTING = 7e14  # operations that such a GPU does in a second


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What a graph has room for."""

    num_tokens: int
    num_single: int  # rows of one token

    @property
    def num_seqs(self) -> int:
        return self.num_single + _MOST_PROMPTS + 1

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE_ROWS) + _MOST_PROMPTS + 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Of the numbers that describe a step: the row of each token and its place among the row's new ones; of each
        sequence the row and how many tokens it has; where each begins; and the tiles."""
        return (self.num_tokens,) * 2 + (self.num_seqs,) * 2 + (self.num_seqs + 1, 2 * self.num_tiles)

    def packed(self, slots: IntArray, num_tokens: IntArray, num_single: int, padding_slot: int) -> IntArray:
        """These numbers for a step whose first `num_single` rows have one token each, one array after the other, each
        aligned to 16 bytes as kernels are compiled for."""
        num_prompts = len(slots) - num_single
        lens = np.zeros(self.num_seqs, np.int64)
        lens[:num_single] = 1
        lens[self.num_single : self.num_single + num_prompts] = num_tokens[num_single:]
        lens[-1] = self.num_tokens - num_tokens.sum()
        seq_slots = np.full(self.num_seqs, padding_slot, np.int64)
        seq_slots[:num_single] = slots[:num_single]
        seq_slots[self.num_single : self.num_single + num_prompts] = slots[num_single:]
        starts = np.concatenate([[0], np.cumsum(lens)])
        offsets = np.arange(self.num_tokens) - np.repeat(starts[:-1], lens)
        tiles = np.tile([self.num_seqs - 1, self.num_tokens], (self.num_tiles, 1))  # past the last token of nobody's
        filled = tiles_of(lens, self.num_single)[0]
        tiles[: len(filled)] = filled
        arrays = (np.repeat(seq_slots, lens), offsets, seq_slots, lens, starts, tiles.reshape(-1))
        return np.concatenate([np.pad(array, (0, -len(array) % _ALIGNED)) for array in arrays])

    def unpacked(self, numbers: Tensor) -> list[Tensor]:
        parts = numbers.split([count + -count % _ALIGNED for count in self.counts])
        return [part[:count] for part, count in zip(parts, self.counts, strict=True)]

    def of_nobody(self, padding_slot: int) -> IntArray:
        """Such numbers without a sequence that is anybody's, and none of them long."""
        num_prompts = min(_MOST_PROMPTS, self.num_tokens)
        lens = np.full(num_prompts, self.num_tokens // num_prompts)
        return self.packed(np.full(num_prompts, padding_slot), lens, 0, padding_slot)


@dataclass(frozen=True, slots=True)
class PromptGraph:
    shape: PromptShape
    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # int32, as the shape packs them
    hidden: Tensor  # [T, H], of all graphs the same memory

    def run(self, numbers: Tensor) -> Tensor:
        """The residual stream of a step's tokens, until the next step."""
        self.numbers.copy_(numbers)
        self.graph.replay()
        return self.hidden


class PromptGraphs:
    """Owns the graphs. `forward` computes the residual stream of all tokens from a step's numbers."""

    def __init__(
        self,
        forward: Callable[[PromptShape, list[Tensor]], Tensor],
        spec: ModelSpec,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        most = most_tokens(spec, max_num_batched_tokens)
        self._shapes = list(prompt_shapes(most, max_num_seqs, max_model_len))
        self._hidden = torch.zeros((most, spec.hidden_size), dtype=dtype, device=device)
        self._graphs: list[PromptGraph] = []

    def capture(self, pool: Any, padding_slot: int) -> None:
        """The largest first, so that the others fit into its memory."""
        for shape in reversed(self._shapes):
            numbers = torch.from_numpy(shape.of_nobody(padding_slot)).to(self._hidden.device, torch.int32)
            hidden = self._hidden[: shape.num_tokens]
            if not self._graphs:
                self._forward(shape, shape.unpacked(numbers))  # compiles kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden.copy_(self._forward(shape, shape.unpacked(numbers)))
            self._graphs.insert(0, PromptGraph(shape, graph, numbers, hidden))

    def fitting(self, num_tokens: int, num_prompts: int, longest: int) -> PromptGraph | None:
        """The smallest that has room for a step of so many tokens and prompts, the longest with so long a context."""
        if num_prompts > _MOST_PROMPTS or longest > _LONG_CONTEXT:
            return None
        return next((graph for graph in self._graphs if graph.shape.num_tokens >= num_tokens), None)


def most_tokens(spec: ModelSpec, max_num_batched_tokens: int) -> int:
    """Of steps that are worth a graph: those that the GPU computes sooner than the host could launch them."""
    worth = spec.num_layers * _LAUNCHING * _COMPUTING / (2 * spec.num_linear_params)
    return min(int(worth), _LADDER[-1][0], max_num_batched_tokens)


def graph_bytes(step_bytes: int, spec: ModelSpec, max_num_batched_tokens: int) -> int:
    """What the graphs need, if a step of the most tokens needs `step_bytes`; they share it."""
    return step_bytes * most_tokens(spec, max_num_batched_tokens) // max(1, max_num_batched_tokens)


def prompt_shapes(max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> Iterator[PromptShape]:
    """The shapes there are graphs for, up to the largest step. What fills one up must be within the model's context."""
    first = 1
    for limit, step in _LADDER:
        for size in range(first // step * step + step, limit + 1, step):
            if size <= max_num_tokens and step <= max_model_len:
                yield PromptShape(size, min(size, max_num_seqs))
        first = limit
