"""Samples the next tokens of a step on a GPU and appends them to the slots: the plain way, which a graph can hold, or
with all features."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.gpu.sample import sample
from headrace.kernels.gpu.threshold_types import Filters
from headrace.kernels.ranges import Ranges, wrap_methods
from headrace.runner.gpu.gpu_slots import GpuSlots
from headrace.runner.gpu.ticket import ResultRing
from headrace.sampling import PlacedMasks, SampledLogprobs, Sampler
from headrace.steps import IntArray, Masks, StepPlan

_RANGES = {"plain": "sample", "with_all_features": "sample"}  # names of a profile's ranges, by method


class StepSampling:
    """Uses the runner's slots. `next_positions` are its own too: [num_slots] computed tokens."""

    def __init__(self, slots: GpuSlots, sampler: Sampler, next_positions: IntArray, device: torch.device) -> None:
        self._slots = slots
        self._sampler = sampler
        self._next_positions = next_positions
        self._device = device

    def plain(
        self,
        logits: Tensor,
        slots: Tensor,
        *,
        has_filters: bool,
        advances: bool,
        ring: ResultRing | None = None,
    ) -> Tensor:
        """Sample with temperature, filters and seed. Needs no host, so that a graph can hold it. [2, B] int32, or with
        a ring its places."""
        columns = self._sampler.columns
        sampled = torch.empty(slots.shape[0], dtype=torch.int64, device=self._device)
        flags = torch.empty(slots.shape[0], dtype=torch.uint8, device=self._device)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        sample(logits, slots, self._slots.lens, columns["temperature"], columns["seed"], sampled, flags, filters)
        return self._append(slots, sampled, flags, advances=advances, ring=ring)

    def with_all_features(
        self, plan: StepPlan, logits: Tensor, slots: Tensor, masks: Masks | None, *, advances: bool
    ) -> tuple[Tensor, SampledLogprobs | None]:
        slots_long = slots.long()
        host_slots = plan.slots if plan.samples.all() else plan.slots[plan.samples]
        sampled = self._sampler.sample(
            logits.float(),
            slots_long,
            self._slots.lens[slots_long],
            host_slots=host_slots,
            host_lens=self._next_positions[host_slots],  # all tokens are computed
            # The model is already running when this waits for the masks.
            masks=None if masks is None else PlacedMasks.of(masks, host_slots, self._device),
        )
        return self._append(slots, sampled.tokens, sampled.flags, advances=advances), sampled.logprobs

    def use_ranges(self, ranges: Ranges | None) -> None:
        wrap_methods(self, _RANGES, ranges)

    def _append(
        self, slots: Tensor, sampled: Tensor, flags: Tensor, *, advances: bool, ring: ResultRing | None = None
    ) -> Tensor:
        columns = self._sampler.columns
        return self._slots.append(
            slots,
            sampled,
            flags,
            end_len=columns["end_len"],
            stop_token_ids=columns["stop_token_ids"],
            advances=advances,
            ring=ring,
        )
