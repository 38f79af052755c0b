"""Runs steps that verify drafts on a GPU: the rows of a slot are rows of a decode graph, one position after the other.

Each row attends to those before it, since a layer stores all keys before it reads any. What a row samples counts as far
as the drafts equal it: see `runner/verification.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu.sample import sample
from headrace.kernels.gpu.threshold_types import Filters
from headrace.runner.gpu.decode_graphs import DecodeGraph
from headrace.runner.gpu.decode_inputs import DecodeInputs
from headrace.runner.gpu.draft_graphs import DraftGraphs
from headrace.runner.gpu.gpu_slots import GpuSlots
from headrace.runner.gpu.upload import Upload
from headrace.runner.verification import drafts_by_slot
from headrace.sampling import PlacedMasks, Sampled, Sampler
from headrace.steps import BROKEN, Drafts, IntArray, Masks, StepPlan


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Uses the buffers of the decode graphs; `next_positions` are the runner's own."""

    slots: GpuSlots
    sampler: Sampler
    inputs: DecodeInputs
    row_slots: Tensor  # [largest graph] int32, the slot of each row of a decode graph
    offsets: Tensor  # [largest graph] int32, the row of each slot's rows; zeros for a step without drafts
    next_positions: IntArray  # [num_slots] computed tokens
    model: DraftGraphs | None  # that drafts, if the host does not

    def run(
        self, plan: StepPlan, drafts: Drafts, graph: DecodeGraph, upload: Upload, masks: Masks | None
    ) -> tuple[Tensor, Sampled]:
        """Verify the drafts of a plan; returns the result of `accept_drafts`, and what was sampled after each row."""
        self._propose(plan, drafts, upload)
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        rows = np.repeat(plan.slots, plan.num_tokens)
        offsets = np.arange(len(rows)) - np.repeat(starts, plan.num_tokens)
        self._fill(rows, offsets, graph, upload)
        places = [upload.put(array) for array in (plan.slots, starts, plan.num_tokens)]
        upload.send()
        graph.model.replay()
        placed = None if masks is None else self._placed(masks, plan, drafts)
        host_lens = self.next_positions[rows] + offsets + 1
        sampled = self._sample(graph.logits[: len(rows)], rows, host_lens, placed)
        columns = self.sampler.columns
        slots, first_rows, num_rows = (upload.get(place) for place in places)
        results = self.slots.accept(
            slots,
            first_rows,
            num_rows,
            sampled.tokens,
            torch.where(sampled.finished == BROKEN, sampled.finished, 0),
            end_len=columns["end_len"],
            stop_token_ids=columns["stop_token_ids"],
        )
        return results, sampled

    def take_accepted(self, slots: IntArray, num_rows: IntArray, num_sampled: IntArray) -> None:
        """The host has learned how many tokens each slot got."""
        self.next_positions[slots] += num_sampled
        if self.model is not None:
            drafted = slots[num_rows > 1]
            self.model.accepted(drafted, self.next_positions[drafted])

    def num_values(self, plan: StepPlan) -> int:
        """The values to send for a step beside its plan: those with which a draft model catches up, at most."""
        return 0 if self.model is None else 6 * int(self.next_positions[plan.slots].sum())

    def _fill(self, rows: IntArray, offsets: IntArray, graph: DecodeGraph, upload: Upload) -> None:
        """Write the input buffers of a decode graph; rows that are left over get the padding slot."""
        num_left = graph.size - len(rows)
        slots = upload.put(np.concatenate([rows, np.full(num_left, self.slots.padding_slot)]))
        row_offsets = upload.put(np.concatenate([offsets, np.zeros(num_left, np.int64)]))
        upload.send()
        self.row_slots[: graph.size].copy_(upload.get(slots))
        self.offsets[: graph.size].copy_(upload.get(row_offsets))

    def _propose(self, plan: StepPlan, drafts: Drafts, upload: Upload) -> None:
        """Write the drafts behind the tokens of their slots."""
        if drafts.tokens is None:
            assert self.model is not None, "drafts of a model without a model"
            self.model.propose(plan.slots, drafts.lens, self.next_positions[plan.slots], upload)
            return
        places = [upload.put(array) for array in (*self._places(plan, drafts), drafts.tokens)]
        upload.send()
        self.slots.put_drafts(*(upload.get(place) for place in places))

    def _places(self, plan: StepPlan, drafts: Drafts) -> tuple[IntArray, IntArray]:
        """The slot of each draft, and its position there."""
        slots, starts = np.repeat(plan.slots, drafts.lens), np.cumsum(drafts.lens) - drafts.lens
        offsets = np.arange(len(slots)) - np.repeat(starts, drafts.lens)
        return slots, self.next_positions[slots] + 1 + offsets

    def _placed(self, masks: Masks, plan: StepPlan, drafts: Drafts) -> PlacedMasks:
        """The masks of all rows. Those after drafts of a model wait for the drafts."""
        tokens, device = drafts.tokens, self.row_slots.device
        if tokens is None:
            slots, positions = (torch.from_numpy(each).to(device) for each in self._places(plan, drafts))
            tokens = self.slots.tokens[slots, positions].cpu().numpy().astype(np.int64)
        return PlacedMasks.of_drafts(masks, plan.slots, drafts_by_slot(plan.slots, tokens, drafts.lens), device)

    def _sample(self, logits: Tensor, rows: IntArray, host_lens: IntArray, masks: PlacedMasks | None) -> Sampled:
        """Sample after each row; `finished` is BROKEN or anything else."""
        slots, lens = self.row_slots[: len(rows)].long(), self.inputs.positions[: len(rows)] + 1
        if not self.sampler.is_plain(rows):
            return self.sampler.sample(logits.float(), slots, lens, host_slots=rows, host_lens=host_lens, masks=masks)
        tokens, flags = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.uint8)
        columns, has_filters = self.sampler.columns, self.sampler.has_filters(rows)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        settings = (columns["temperature"], columns["seed"])
        sample(logits, slots, lens, *settings, tokens, flags, filters, lens_of_batch=True)
        return Sampled(tokens, flags, None)
