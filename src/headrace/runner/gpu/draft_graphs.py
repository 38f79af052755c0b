"""Drafts tokens on a GPU: one CUDA graph replay for each token of all sequences.

    catch up (own cache only, eager) ─▶ replay ─▶ replay ─▶ ...        each reads the token that the one before wrote

A replay computes one token of each slot with the draft decoder, samples the next one and writes it behind the slot's
known tokens, where the step that verifies it reads it. With a cache of its own the draft model runs once more than it
drafts: then its cache holds every token that can be accepted, and it catches up only with steps that drafted nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu import slots as slot_kernels
from headrace.kernels.gpu.few_decodes import MAX_FEW_DECODES
from headrace.kernels.gpu.sample import sample
from headrace.kernels.gpu.threshold_types import Filters
from headrace.kernels.layout import LayerCache, Splits, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.gpu.capture import Capture, Replay, stream_after_current
from headrace.runner.gpu.decode_inputs import DecodeInputs
from headrace.runner.gpu.gpu_slots import GpuSlots
from headrace.runner.gpu.graph_sizes import decode_graph_size
from headrace.runner.gpu.step_layouts import StepLayouts, StepOrder
from headrace.runner.gpu.upload import Upload
from headrace.runner.shape import RunnerShape
from headrace.sampling import Sampler
from headrace.steps import IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class DraftCache:
    """Where a draft decoder keeps keys and values. `is_shared`: in the model's cache, of which it is the first part."""

    layers: list[LayerCache]
    is_shared: bool


class DraftGraphs:
    """Owns the graphs of a draft decoder, and how many tokens of each slot are in its cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: DraftCache,
        slots: GpuSlots,
        sampler: Sampler,
        shape: RunnerShape,
        splits: Callable[[int], Splits],
    ) -> None:
        device, max_size = decoder.device, decode_graph_size(shape.max_draft_seqs)
        self._decoder, self._cache, self._shape, self._splits = decoder, cache, shape, splits
        self._slots, self._sampler = slots, sampler
        self._inputs = DecodeInputs(max_size, device)
        self._row_slots = torch.full((max_size,), slots.padding_slot, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(max_size, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], Replay] = {}  # by size and whether filters are used
        self._computed = np.zeros(slots.num_slots, np.int64)
        self._computed_there = torch.zeros(slots.num_slots, dtype=torch.int64, device=device)
        self._layouts = StepLayouts(
            decoder, shape, cache.layers, slots.tokens, self._computed_there, slots.block_tables, splits
        )

    @property
    def sizes(self) -> list[int]:
        """The largest first, so that the others fit into its memory."""
        return sorted(set(map(decode_graph_size, range(1, self._shape.max_draft_seqs + 1))), reverse=True)

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        stream = stream_after_current(self._decoder.device)
        with torch.cuda.stream(stream):
            for size in (self.sizes[0], self.sizes[-1]):  # compiles kernels
                for has_filters in (False, True):
                    self._forward(size, has_filters)
        stream.synchronize()
        for size in self.sizes:
            for has_filters in (False, True):
                self._graphs[size, has_filters] = capture.model(partial(self._forward, size, has_filters)).graph

    def enter(self, slot: int) -> None:
        self._computed[slot] = 0

    def propose(self, slots: IntArray, lens: IntArray, positions: IntArray, upload: Upload) -> None:
        """Write `lens` drafts behind the tokens of each slot. `positions`: how many of them the model has computed, all
        but the last."""
        slots, lens, positions = slots[lens > 0], lens[lens > 0], positions[lens > 0]
        num_passes = lens if self._cache.is_shared else lens + 1
        if not self._cache.is_shared:
            self._catch_up(slots, positions, upload)
        size = decode_graph_size(len(slots))
        rows = np.full((int(num_passes.max()), size), self._slots.padding_slot)
        for index, row in enumerate(rows):
            row[: len(slots)] = np.where(num_passes > index, slots, self._slots.padding_slot)
        place = upload.put(rows)
        upload.send()
        self._offsets.zero_()
        graph = self._graphs[size, self._sampler.has_filters(slots)]
        for row_slots in upload.get(place).view(rows.shape):
            self._row_slots[:size].copy_(row_slots)
            graph.replay()

    def accepted(self, slots: IntArray, positions: IntArray) -> None:
        """The model has computed `positions` tokens of each slot, with the drafts that were accepted."""
        self._computed[slots] = positions

    def _forward(self, size: int, has_filters: bool) -> Tensor:
        slots, inputs, columns = self._row_slots[:size], self._inputs.first(size), self._sampler.columns
        slot_kernels.prepare_decode(
            slots,
            self._slots.tokens,
            self._slots.computed,
            self._slots.block_tables,
            self._shape.block_size,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.context_lens,
            self._offsets[:size],
        )
        logits = self._decoder.logits(
            self._decoder.hidden(inputs.token_ids, self._layout(size, inputs), self._cache.layers)
        )
        sampled = torch.empty(size, dtype=torch.int64, device=slots.device)
        flags = torch.empty(size, dtype=torch.uint8, device=slots.device)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        lens = inputs.positions + 1
        settings = (columns["temperature"], columns["seed"])
        sample(logits, slots, lens, *settings, sampled, flags, filters, lens_of_batch=True)
        self._slots.put_drafts(slots, lens, sampled.int())
        self._offsets[:size].add_(1)
        return sampled

    def _layout(self, size: int, inputs: DecodeInputs) -> StepLayout:
        return StepLayout(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slots=self._row_slots[:size],
            block_tables=self._slots.block_tables,
            max_query_len=1,
            max_context_len=self._shape.max_model_len,
            num_decodes=size,
            splits=self._splits(size),
            has_few_decodes=size <= MAX_FEW_DECODES,
        )

    def _catch_up(self, slots: IntArray, positions: IntArray, upload: Upload) -> None:
        """Compute what the model has computed of these slots and the draft model has not."""
        while (behind := positions - self._computed[slots]).any():
            most = max(1, self._shape.max_num_batched_tokens // int((behind > 0).sum()))
            num_tokens = np.minimum(behind, most)
            is_fresh = self._computed[slots] == 0
            order = np.argsort(is_fresh, kind="stable")
            order = order[num_tokens[order] > 0]
            self._compute(slots[order], num_tokens[order], int(is_fresh[order].sum()), upload)

    def _compute(self, slots: IntArray, num_tokens: IntArray, num_fresh: int, upload: Upload) -> None:
        places = [upload.put(array) for array in (slots, self._computed[slots], np.cumsum(num_tokens) - 1)]
        upload.send()
        slots_there, computed, ends = (upload.get(place).long() for place in places)
        self._computed_there[slots_there] = computed
        self._computed[slots] += num_tokens
        plan = StepPlan(0, slots, num_tokens, np.ones(len(slots), np.bool_), int(num_tokens.sum()))
        layout, token_ids = self._layouts.of_step(plan, StepOrder(0, num_fresh, self._computed[slots], None), upload)
        self._decoder.hidden(token_ids, layout, self._cache.layers, kept=ends)
