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
from headrace.runner.gpu.decode_inputs import DecodeInputs, RowInputs
from headrace.runner.gpu.draft_graphs import DraftGraphs
from headrace.runner.gpu.gpu_slots import GpuSlots
from headrace.runner.gpu.upload import Upload
from headrace.runner.verification import drafts_by_slot
from headrace.sampling import PlacedMasks, SampledLogprobs, Sampler
from headrace.steps import Drafts, IntArray, Masks, StepPlan


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Uses the buffers of the decode graphs; `next_positions` are the runner's own."""

    slots: GpuSlots
    sampler: Sampler
    inputs: DecodeInputs
    rows: RowInputs
    next_positions: IntArray  # [num_slots] computed tokens
    model: DraftGraphs | None  # that drafts, if the host does not

    def run(
        self, plan: StepPlan, drafts: Drafts, graph: DecodeGraph, upload: Upload, masks: Masks | None
    ) -> tuple[Tensor, SampledLogprobs | None]:
        """Verify the drafts of a plan; returns the result of `accept_drafts`, and log-probabilities for each row."""
        if drafts.tokens is None:
            assert self.model is not None, "drafts of a model without a model"
            self.model.propose(plan.slots, drafts.lens, self.next_positions[plan.slots], upload)
        self.rows.put_drafts(plan.slots, plan.num_tokens, drafts.tokens, graph.size)
        graph.model.replay()
        if self.sampler.is_plain(plan.slots):
            verifying = graph.verifying_filtered if self.sampler.has_filters(plan.slots) else graph.verifying
            if verifying is not None:
                verifying.graph.replay()
                return verifying.results, None
            return self.verify(graph.logits, self.sampler.has_filters(plan.slots)), None
        return self._verify_with_all_features(plan, drafts, graph, masks)

    def verify(self, logits: Tensor, has_filters: bool) -> Tensor:
        """Sample after each row with temperature, filters and seed, and accept. Needs no host, so that a graph can hold
        it. [3, R] int32."""
        size, columns = logits.shape[0], self.sampler.columns
        tokens = torch.empty(size, dtype=torch.int64, device=logits.device)
        flags = torch.empty(size, dtype=torch.uint8, device=logits.device)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        settings = (columns["temperature"], columns["seed"])
        lens = self.inputs.positions[:size] + 1
        sample(logits, self.rows.slots(size), lens, *settings, tokens, flags, filters, lens_of_batch=True)
        return self._accept(tokens, flags)

    def _verify_with_all_features(
        self, plan: StepPlan, drafts: Drafts, graph: DecodeGraph, masks: Masks | None
    ) -> tuple[Tensor, SampledLogprobs | None]:
        num_rows = int(plan.num_tokens.sum())
        rows, starts = np.repeat(plan.slots, plan.num_tokens), np.cumsum(plan.num_tokens) - plan.num_tokens
        offsets = np.arange(num_rows) - np.repeat(starts, plan.num_tokens)
        sampled = self.sampler.sample(
            graph.logits[:num_rows].float(),
            self.rows.slots(num_rows).long(),
            self.inputs.positions[:num_rows] + 1,
            host_slots=rows,
            host_lens=self.next_positions[rows] + offsets + 1,
            masks=None if masks is None else self._placed(masks, plan, drafts),
        )
        return self._accept(sampled.tokens, sampled.flags), sampled.logprobs

    def _accept(self, tokens: Tensor, flags: Tensor) -> Tensor:
        size, columns = tokens.shape[0], self.sampler.columns
        return self.slots.accept(
            self.rows.slots(size),
            self.rows.num_rows(size),
            tokens,
            flags,
            end_len=columns["end_len"],
            stop_token_ids=columns["stop_token_ids"],
        )

    def take_accepted(self, slots: IntArray, num_rows: IntArray, num_sampled: IntArray) -> None:
        """The host has learned how many tokens each slot got."""
        self.next_positions[slots] += num_sampled
        if self.model is not None:
            drafted = slots[num_rows > 1]
            self.model.accepted(drafted, self.next_positions[drafted])

    def num_values(self, plan: StepPlan) -> int:
        """The values to send for a step beside its plan: those with which a draft model catches up, at most."""
        return 0 if self.model is None else 6 * int(self.next_positions[plan.slots].sum())

    def _places(self, plan: StepPlan, drafts: Drafts) -> tuple[IntArray, IntArray]:
        """The slot of each draft, and its position there."""
        slots, starts = np.repeat(plan.slots, drafts.lens), np.cumsum(drafts.lens) - drafts.lens
        offsets = np.arange(len(slots)) - np.repeat(starts, drafts.lens)
        return slots, self.next_positions[slots] + 1 + offsets

    def _placed(self, masks: Masks, plan: StepPlan, drafts: Drafts) -> PlacedMasks:
        """The masks of all rows. Those after drafts of a model wait for the drafts."""
        tokens, device = drafts.tokens, self.slots.tokens.device
        if tokens is None:
            slots, positions = (torch.from_numpy(each).to(device) for each in self._places(plan, drafts))
            tokens = self.slots.tokens[slots, positions].cpu().numpy().astype(np.int64)
        return PlacedMasks.of_drafts(masks, plan.slots, drafts_by_slot(plan.slots, tokens, drafts.lens), device)
