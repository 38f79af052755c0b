"""Steps of few tokens on a CPU, each from the first layer to the logits one graph of kernels (`kernels/cpu/graphs.py`).

A graph is for one shape of step. It is recorded when the shape comes for the second time, while that step runs. Steps
that verify drafts have another number of tokens each time, so their graphs have rows for a few more, whose keys and
values go to a block of no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models.decoder import Decoder

MAX_TOKENS = 64  # of a step; in larger ones a graph saves little
MAX_GRAPHS = 256
_BY_TOKEN = ("positions", "slot_mapping")  # inputs of a layout that are different in each step
_BY_SEQUENCE = ("query_starts", "context_lens", "slots")


class StepShape(NamedTuple):
    num_seqs: int
    num_rows: int

    @classmethod
    def of(cls, num_seqs: int, num_tokens: int) -> StepShape:
        spacing = 1 if num_tokens == num_seqs or num_tokens <= 8 else 2 if num_tokens <= 16 else 4
        return cls(num_seqs, -(-num_tokens // spacing) * spacing)


@dataclass(frozen=True, slots=True)
class StepGraph:
    graph: ops.Graph
    inputs: StepInputs  # read and changed by the graph

    def run(self, residual: Tensor, layout: StepLayout) -> Tensor:
        self.inputs.write(residual, layout)
        return self.graph.run()[: layout.num_tokens]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The memory that a graph reads."""

    residual: Tensor  # [rows, H]
    layout: StepLayout
    padding_slot: int

    @classmethod
    def of(cls, residual: Tensor, layout: StepLayout, num_rows: int, padding_slot: int) -> StepInputs:
        by_token = {name: getattr(layout, name).new_zeros(num_rows) for name in _BY_TOKEN}
        by_sequence = {name: getattr(layout, name).clone() for name in _BY_SEQUENCE}
        found = cls(
            residual.new_zeros(num_rows, residual.shape[1]),
            replace(layout, **by_token, **by_sequence, max_query_len=MAX_TOKENS),  # of any step with this shape
            padding_slot,
        )
        found.write(residual, layout)
        return found

    def write(self, residual: Tensor, layout: StepLayout) -> None:
        num_tokens = layout.num_tokens
        self.residual[:num_tokens].copy_(residual)
        for name in _BY_TOKEN:
            getattr(self.layout, name)[:num_tokens].copy_(getattr(layout, name))
        for name in _BY_SEQUENCE:
            getattr(self.layout, name).copy_(getattr(layout, name))
        if num_tokens < len(self.residual):
            self.residual[num_tokens:].zero_()
            self.layout.positions[num_tokens:].zero_()
            self.layout.slot_mapping[num_tokens:].fill_(self.padding_slot)


class StepGraphs:
    """Runs steps that need the logits of every token, small ones by graphs. Owns the graphs."""

    def __init__(self, decoder: Decoder, caches: list[LayerCache], padding_block: int) -> None:
        """`padding_block`: one of the caches that no sequence gets."""
        self._decoder, self._caches, self._padding_block = decoder, caches, padding_block
        is_whole = decoder.group is None and decoder.stages is None and decoder.stream is None
        is_plain = type(decoder) is Decoder  # others have more inputs than embeddings
        self._recorder = ops.recorder(decoder.device, decoder.dtype) if is_whole and is_plain else None
        self._graphs: dict[StepShape, StepGraph | None] = {}  # None: the shape came once
        self._uses_graphs = True

    @property
    def num_graphs(self) -> int:
        return sum(each is not None for each in self._graphs.values())

    def use_graphs(self, uses_graphs: bool) -> None:
        """A profiler sees a graph as one kernel, so none is used while one records."""
        self._uses_graphs = uses_graphs

    def logits(self, token_ids: Tensor, layout: StepLayout) -> Tensor:
        """[T] -> [T, V]: see `Decoder.step_logits`. The next step may write over the result."""
        if layout.adapters is not None or not self._uses_graphs or self._recorder is None:
            return self._decoder.step_logits(token_ids, layout, self._caches)
        shape = StepShape.of(layout.num_seqs, layout.num_tokens)
        residual = self._decoder.embedded(token_ids, layout)
        if (found := self._graphs.get(shape)) is not None:
            return self._decoder.capped(found.run(residual, layout))
        if shape in self._graphs:
            return self._decoder.capped(self._recorded(shape, residual, layout))
        if shape.num_rows <= MAX_TOKENS and len(self._graphs) < MAX_GRAPHS:
            self._graphs[shape] = None
        return self._decoder.capped(self._uncapped(residual, layout))

    def _recorded(self, shape: StepShape, residual: Tensor, layout: StepLayout) -> Tensor:
        """Runs a step and records it. If it cannot be recorded, no other step is."""
        assert self._recorder is not None
        slot = self._padding_block * self._caches[0].block_size
        inputs = StepInputs.of(residual, layout, shape.num_rows, slot)
        found = self._recorder.record(lambda: self._uncapped(inputs.residual, inputs.layout))
        if found is None:
            self._recorder = None
            self._graphs.clear()
            return self._uncapped(residual, layout)
        logits, graph = found
        self._graphs[shape] = StepGraph(graph, inputs)
        return logits[: layout.num_tokens]

    def _uncapped(self, residual: Tensor, layout: StepLayout) -> Tensor:
        return self._decoder.uncapped_logits(residual, layout, self._caches)
