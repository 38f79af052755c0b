"""CUDA graphs for small steps with prompts: launched kernel by kernel, the GPU would wait for the host.

A step is brought into the fixed form of a graph of its size:

    | decode: max_num_seqs entries | prompts: MAX_PROMPTS entries | padding: one prompt |

Unused entries have zero tokens. The padding prompt takes up the remaining tokens of the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.models.spec import ModelSpec
from headrace.runner.gpu.capture import Capture, Replay
from headrace.runner.gpu.graph_sizes import (
    MAX_PROMPTS,
    fitting_prefill_size,
    max_prefill_tokens,
    prefill_graph_sizes,
)
from headrace.runner.gpu.tiles import TILE_ROWS, tiles_of
from headrace.steps import IntArray

_ALIGNMENT = 4  # int32 values: 16 bytes, as kernels are compiled for


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a graph has room for, and how a step is described to it."""

    num_tokens: int
    num_decodes: int  # decode sequences

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + MAX_PROMPTS + 1

    @property
    def num_tiles(self) -> int:
        return -(-self.num_tokens // TILE_ROWS) + MAX_PROMPTS + 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Lengths of the arrays that describe a step: each token's slot and index among the slot's new tokens; each
        sequence's slot and number of tokens; the start of each sequence; and the tiles."""
        return (self.num_tokens,) * 2 + (self.num_seqs,) * 2 + (self.num_seqs + 1, 2 * self.num_tiles)

    def packed(self, slots: IntArray, num_tokens: IntArray, num_decodes: int, padding_slot: int) -> IntArray:
        """Packs these arrays one after the other, for a step whose first `num_decodes` slots decode one token each.
        Each is aligned to 16 bytes."""
        num_prompts = len(slots) - num_decodes
        lens = np.zeros(self.num_seqs, np.int64)
        lens[:num_decodes] = 1
        lens[self.num_decodes : self.num_decodes + num_prompts] = num_tokens[num_decodes:]
        lens[-1] = self.num_tokens - num_tokens.sum()
        seq_slots = np.full(self.num_seqs, padding_slot, np.int64)
        seq_slots[:num_decodes] = slots[:num_decodes]
        seq_slots[self.num_decodes : self.num_decodes + num_prompts] = slots[num_decodes:]
        starts = np.concatenate([[0], np.cumsum(lens)])
        offsets = np.arange(self.num_tokens) - np.repeat(starts[:-1], lens)
        tiles = np.tile([self.num_seqs - 1, self.num_tokens], (self.num_tiles, 1))  # past the end of the padding prompt
        filled = tiles_of(lens, self.num_decodes)[0]
        tiles[: len(filled)] = filled
        arrays = (np.repeat(seq_slots, lens), offsets, seq_slots, lens, starts, tiles.reshape(-1))
        return np.concatenate([np.pad(array, (0, -len(array) % _ALIGNMENT)) for array in arrays])

    def unpacked(self, values: Tensor) -> list[Tensor]:
        parts = values.split([count + -count % _ALIGNMENT for count in self.counts])
        return [part[:count] for part, count in zip(parts, self.counts, strict=True)]

    def only_padding(self, padding_slot: int) -> IntArray:
        """A packed step of padding only, in prompts short enough for any context."""
        num_prompts = min(MAX_PROMPTS, self.num_tokens)
        lens = np.full(num_prompts, self.num_tokens // num_prompts)
        return self.packed(np.full(num_prompts, padding_slot), lens, 0, padding_slot)


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    shape: PrefillShape
    graph: Replay
    inputs: Tensor  # int32, as the shape packs them
    hidden: Tensor  # [T, H], the same memory for all graphs

    def run(self, inputs: Tensor) -> Tensor:
        """The residual stream of a step's tokens, valid until the next step."""
        self.inputs.copy_(inputs)
        self.graph.replay()
        return self.hidden


class PrefillGraphs:
    """Owns the graphs. `forward` computes the residual stream of all tokens from the arrays of a shape."""

    def __init__(
        self,
        forward: Callable[[PrefillShape, list[Tensor]], Tensor],
        spec: ModelSpec,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        max_tokens = max_prefill_tokens(spec, max_num_batched_tokens)
        self._shapes = list(prefill_shapes(max_tokens, max_num_seqs, max_model_len))
        self._hidden = torch.zeros((max_tokens, spec.hidden_size), dtype=dtype, device=device)
        self._graphs: dict[int, PrefillGraph] = {}  # by their number of tokens
        self.sizes: list[int] = []  # of the captured graphs, in tokens, ascending

    @property
    def num_graphs(self) -> int:
        return len(self._shapes)

    def warm_up(self, padding_slot: int) -> None:
        """Run the largest step once, which compiles kernels."""
        for shape in self._shapes[-1:]:
            self._forward(shape, shape.unpacked(self._padding(shape, padding_slot)))

    def capture(self, capture: Capture, padding_slot: int, captured: Callable[[], None]) -> None:
        """Capture the largest graph first, so that the others fit into its memory. `captured` is called after each."""
        for shape in reversed(self._shapes):
            inputs = self._padding(shape, padding_slot)
            step = partial(self._fill, self._hidden[: shape.num_tokens], shape, inputs)
            graph, hidden = capture.model(step)
            self._graphs[shape.num_tokens] = PrefillGraph(shape, graph, inputs, hidden)
            captured()
        self.sizes = sorted(self._graphs)

    def _fill(self, hidden: Tensor, shape: PrefillShape, inputs: Tensor) -> Tensor:
        return hidden.copy_(self._forward(shape, shape.unpacked(inputs)))

    def _padding(self, shape: PrefillShape, padding_slot: int) -> Tensor:
        return torch.from_numpy(shape.only_padding(padding_slot)).to(self._hidden.device, torch.int32)

    def fitting(self, num_tokens: int, num_prompts: int, longest: int) -> PrefillGraph | None:
        """The smallest graph with room for a step; see `fitting_prefill_size`."""
        size = fitting_prefill_size(self.sizes, num_tokens, num_prompts, longest)
        return None if size is None else self._graphs[size]


def prefill_shapes(max_num_tokens: int, max_num_seqs: int, max_model_len: int) -> Iterator[PrefillShape]:
    """The shapes that graphs are captured for."""
    for size in prefill_graph_sizes(max_num_tokens, max_model_len):
        yield PrefillShape(size, min(size, max_num_seqs))
