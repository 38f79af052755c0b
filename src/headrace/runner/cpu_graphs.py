"""Steps of few tokens on a CPU, each as one graph of kernels (`kernels/cpu/graphs.py`).

A graph is for one shape of step. It is recorded when the shape comes for the second time, while that step runs.
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
_INPUTS = ("positions", "slot_mapping", "query_starts", "context_lens", "slots")  # of a layout, different in each step


class StepShape(NamedTuple):
    num_seqs: int
    num_tokens: int
    max_query_len: int


@dataclass(frozen=True, slots=True)
class StepGraph:
    graph: ops.Graph
    residual: Tensor  # [T, H], read and changed by the graph
    layout: StepLayout  # read by the graph

    def run(self, residual: Tensor, layout: StepLayout) -> Tensor:
        self.residual.copy_(residual)
        for name in _INPUTS:
            getattr(self.layout, name).copy_(getattr(layout, name))
        return self.graph.run()


class StepGraphs:
    """Runs a decoder, small steps by graphs. Owns the graphs."""

    def __init__(self, decoder: Decoder, caches: list[LayerCache]) -> None:
        self._decoder, self._caches = decoder, caches
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

    def hidden(self, token_ids: Tensor, layout: StepLayout, kept: Tensor | None = None) -> Tensor:
        """See `Decoder.hidden`. The next step may write over the result."""
        shape = StepShape(layout.num_seqs, layout.num_tokens, layout.max_query_len)
        keeps_all = kept is None or len(kept) == len(token_ids)
        if keeps_all and layout.adapters is None and self._uses_graphs and self._recorder is not None:
            found = self._graphs.get(shape)
            if found is not None:
                return found.run(self._decoder.embedded(token_ids, layout), layout)
            if shape in self._graphs:
                return self._recorded(shape, self._decoder.embedded(token_ids, layout), layout)
            if shape.num_tokens <= MAX_TOKENS and len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
        return self._decoder.hidden(token_ids, layout, self._caches, kept=kept)

    def _recorded(self, shape: StepShape, residual: Tensor, layout: StepLayout) -> Tensor:
        """Runs a step and records it. If it cannot be recorded, no other step is."""
        assert self._recorder is not None
        inputs = replace(layout, **{name: getattr(layout, name).clone() for name in _INPUTS})
        stream = residual.clone()
        found = self._recorder.record(lambda: self._through_layers(stream, inputs))
        if found is None:
            self._recorder = None
            self._graphs.clear()
            return self._through_layers(residual, layout)
        hidden, graph = found
        self._graphs[shape] = StepGraph(graph, stream, inputs)
        return hidden

    def _through_layers(self, residual: Tensor, layout: StepLayout) -> Tensor:
        return self._decoder.through_layers(residual, layout, self._caches)
