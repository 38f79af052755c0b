"""CUDA graphs for decode steps: one graph for the model, one for sampling and appending the token.

    prepare ─▶ model ─▶ logits      ▏ sample ─▶ append              both read and write the slots on the GPU
    └──────── model graph ────────┘ ▏ └──── sampling graph ────┘
                                    ▏ sample ─▶ accept              in its place, in a step that verifies drafts
    prepare ─▶ model ─▶ logits  ─▶  sample ─▶ append ─▶ pinned memory
    └─────────────── whole graph, of few sequences ───────────────┘

With adapters there are graphs for steps in which a sequence has one, and others without the kernels of adapters.
Sampling is a graph of its own, since sequences that use more than temperature, min_p, top_k, top_p and a seed are
sampled outside of it. The sizes are chosen in `graph_sizes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from headrace.kernels.gpu.few_decodes import MAX_FEW_DECODES
from headrace.runner.gpu.capture import Capture, Replay, stream_after_current
from headrace.runner.gpu.graph_sizes import decode_graph_size, fastest_sizes, sharing_graph_size
from headrace.startup import mark


class Forward(Protocol):
    """Computes the logits [B, V] of a decode step of `size` sequences from its input buffers; the hidden states [B, H]
    on a stage without a head."""

    def __call__(self, size: int, *, is_sharing: bool) -> Tensor: ...


# (logits [B, V], has_filters) -> [2, B] int32: tokens and their states; [3, B] of a step that verifies drafts
SampleStep = Callable[[Tensor, bool], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingGraph:
    """Samples the next token of each slot and appends it."""

    graph: Replay
    results: Tensor  # [2, B] int32: tokens, and the state of each slot (`StepResult.finished`); or see `accept_drafts`


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The graphs of one number of sequences."""

    size: int
    model: Replay
    logits: Tensor  # [B, V]
    sampling: SamplingGraph | None  # None: a later stage of the pipeline samples
    sampling_filtered: SamplingGraph | None  # with min_p, top_k and top_p
    verifying: SamplingGraph | None = None  # of drafts
    verifying_filtered: SamplingGraph | None = None
    whole: Replay | None = None  # of few sequences: the model, sampling without filters, results to pinned memory


class DecodeGraphs:
    """Owns the graphs of all sizes, with and without prefix sharing."""

    def __init__(
        self,
        max_num_seqs: int,
        *,
        enable_sharing: bool,
        max_draft_rows: int = 0,
        enable_adapters: bool = False,
        are_timed: bool = True,
    ) -> None:
        """`max_draft_rows`: of a step in which sequences have several rows each; prefixes are not shared in it, nor in
        steps with adapters. `are_timed`: the fastest graph with room for a step is taken, else the smallest."""
        self._enable_adapters = enable_adapters
        max_rows = max(max_num_seqs, max_draft_rows)
        self.max_size = decode_graph_size(max_rows)
        self._max_verifying = decode_graph_size(max_draft_rows) if max_draft_rows else 0
        # The largest first, so that the others fit into its memory.
        self._sizes = sorted(set(map(decode_graph_size, range(1, max_rows + 1))), reverse=True)
        self._max_sharing_size = decode_graph_size(max_num_seqs)
        sharing_sizes = {
            sharing_graph_size(num_seqs, self._max_sharing_size) for num_seqs in range(1, max_num_seqs + 1)
        }
        self._sharing_sizes = sorted(sharing_sizes, reverse=True) if enable_sharing else []
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by size and whether prefixes are shared
        self._are_timed = are_timed
        self._adapted: dict[int, DecodeGraph] = {}  # with adapters, by size
        self._fast_sizes: dict[int, int] = {}  # for each size, that of the fastest graph with room for it

    def fitting(self, num_seqs: int, *, is_sharing: bool, has_adapters: bool = False) -> DecodeGraph:
        """The graph for a decode step of `num_seqs` sequences."""
        if has_adapters:
            assert not is_sharing
            return self._adapted[self._fast_sizes[decode_graph_size(num_seqs)]]
        if is_sharing:
            return self._graphs[sharing_graph_size(num_seqs, self._max_sharing_size), True]
        return self._graphs[self._fast_sizes[decode_graph_size(num_seqs)], False]

    @property
    def num_graphs(self) -> int:
        return len(self._sizes) * (1 + self._enable_adapters) + len(self._sharing_sizes)

    @torch.inference_mode()
    def warm_up(
        self,
        forward: Forward,
        sample: SampleStep | None,
        device: torch.device,
        verify: SampleStep | None = None,
        *,
        has_adapters: bool = False,
    ) -> None:
        """Run steps of a few sizes once, which compiles kernels and sets up libraries. `sample`: None on a stage that
        does not; `verify`: None without drafts; `has_adapters`: in these steps."""
        sizes = self._sizes
        stream = stream_after_current(device)
        with torch.cuda.stream(stream):
            for size in () if has_adapters else self._sharing_sizes[:1]:  # first: its kernels take longest to compile
                forward(size, is_sharing=True)
            for size in {sizes[0], sizes[-1], sizes[-2:][0]}:
                logits = forward(size, is_sharing=False)
                for choose in filter(None, (sample, verify)):
                    for has_filters in (False, True):
                        choose(logits, has_filters)
        stream.synchronize()

    @torch.inference_mode()
    def capture(
        self,
        forward: Forward,
        sample: SampleStep | None,
        capture: Capture,
        captured: Callable[[], None],
        adapted: Forward | None = None,
        verify: SampleStep | None = None,
        whole: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Capture every size. `captured` is called after each. `adapted`: a step with adapters, if they are enabled;
        `verify`: samples and accepts drafts, if there are any; `whole`: a step of few sequences with all that follows,
        if one graph can hold that."""
        assert (adapted is not None) == self._enable_adapters
        for size in self._sizes:
            graph = _captured(size, forward, sample, capture, is_sharing=False)
            if whole is not None and size <= MAX_FEW_DECODES:
                graph = replace(graph, whole=capture.local(partial(whole, size)).graph)
            self._graphs[size, False] = self._with_verifying(graph, verify, capture)
            captured()
        mark("decode graphs captured")
        self._fast_sizes = self._find_fast_sizes(capture)
        mark("decode graphs timed")
        for size in self._sharing_sizes:
            forward(size, is_sharing=True)  # compiles kernels
            self._graphs[size, True] = _captured(size, forward, sample, capture, is_sharing=True)
            captured()
        mark("graphs of shared prefixes captured")
        if adapted is None:
            return
        for size in self._sizes:
            graph = _captured(size, adapted, sample, capture, is_sharing=False)
            self._adapted[size] = self._with_verifying(graph, verify, capture)
            captured()

    def _with_verifying(self, graph: DecodeGraph, verify: SampleStep | None, capture: Capture) -> DecodeGraph:
        if verify is None or graph.size > self._max_verifying:
            return graph
        verifying, filtered = _captured_sampling(verify, graph.logits, capture)
        return replace(graph, verifying=verifying, verifying_filtered=filtered)

    def _find_fast_sizes(self, capture: Capture) -> dict[int, int]:
        if not self._are_timed:
            return {size: size for size in self._sizes}
        milliseconds = {size: _replay_milliseconds(self._graphs[size, False].model) for size in self._sizes}
        return fastest_sizes(capture.agreed(milliseconds))


def _captured(
    size: int, forward: Forward, sample: SampleStep | None, capture: Capture, *, is_sharing: bool
) -> DecodeGraph:
    model, logits = capture.model(lambda: forward(size, is_sharing=is_sharing))
    if sample is None:
        return DecodeGraph(size, model, logits, None, None)
    return DecodeGraph(size, model, logits, *_captured_sampling(sample, logits, capture))


def _captured_sampling(sample: SampleStep, logits: Tensor, capture: Capture) -> tuple[SamplingGraph, SamplingGraph]:
    """Without and with filters."""
    without, filtered = (
        SamplingGraph(*capture.local(partial(sample, logits, has_filters))) for has_filters in (False, True)
    )
    return without, filtered


def _replay_milliseconds(graph: Replay) -> float:
    """How long a replay takes: the smaller of two measurements after a warm-up."""
    first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    graph.replay()
    first.record()
    graph.replay()
    middle.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(min(first.elapsed_time(middle), middle.elapsed_time(last)))
