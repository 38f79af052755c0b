"""Drafts tokens with a model: a smaller one with its own KV cache, or the model's own first layers.

    draft_model   its caches have the blocks of the model's; it computes a sequence's tokens when it first drafts for it
    early_exit    the first layers write the same keys and values as in the whole model, to the same cache

A drafted token is sampled with the temperature, filters, seed and position of the token that it guesses. The random
number is then the same as the model's own, so that both sample the same token where their probabilities agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.layout import LayerCache
from headrace.models.decoder import Decoder
from headrace.runner.cpu_graphs import StepGraphs
from headrace.runner.slots import DeviceSlots
from headrace.sampling import Sampler


def first_layers(decoder: Decoder, num_layers: int) -> Decoder:
    """The decoder's first layers, with its own head. The weights are shared."""
    spec = replace(decoder.spec, num_layers=num_layers)
    return replace(decoder, spec=spec, layers=decoder.layers[:num_layers])


@dataclass(frozen=True, slots=True)
class Proposer:
    """A decoder that drafts. `shares_cache`: it is the first part of the model, with the first part of its cache."""

    decoder: Decoder
    shares_cache: bool


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Drafts on a CPU. Owns how many tokens of each slot its cache holds; None: it shares the model's cache."""

    decoder: Decoder
    caches: list[LayerCache]
    steps: StepGraphs  # of the decoder and its caches
    max_tokens: int  # of one pass
    computed: Tensor | None  # [num_slots] int64

    def enter(self, slot: int) -> None:
        if self.computed is not None:
            self.computed[slot] = 0

    def propose(self, slots: Tensor, lens: Tensor, device_slots: DeviceSlots, sampler: Sampler) -> None:
        """Write `lens` drafts of each of these slots behind its known tokens."""
        slots, lens = slots[lens > 0], lens[lens > 0]
        known = device_slots.lens[slots]
        starts = (device_slots.computed if self.computed is None else self.computed)[slots]
        starts = self._catch_up(slots, starts, known - 1, device_slots)
        for position in range(int(lens.max())):
            is_on = lens > position
            slots, lens, known, starts = slots[is_on], lens[is_on], known[is_on], starts[is_on]
            ends = known + position
            logits = self._logits(slots, starts, ends - starts, device_slots)
            device_slots.tokens[slots, ends] = sampler.sample_drafts(logits, slots, ends).int()
            starts = ends

    def accepted(self, slots: Tensor, computed: Tensor) -> None:
        """`computed` tokens of each slot are computed and known: what the cache holds of others is dropped."""
        if self.computed is not None:
            self.computed[slots] = torch.minimum(self.computed[slots], computed)

    def _catch_up(self, slots: Tensor, starts: Tensor, ends: Tensor, device_slots: DeviceSlots) -> Tensor:
        """Compute tokens up to `ends`, in passes of at most `max_tokens`, until one pass holds what is left."""
        while int((ends - starts).sum()) + len(slots) > self.max_tokens:
            num_tokens = torch.minimum(ends - starts, torch.tensor(self.max_tokens // len(slots)))
            behind = num_tokens > 0
            self._logits(slots[behind], starts[behind], num_tokens[behind], device_slots)
            starts = starts + num_tokens
        return starts

    def _logits(self, slots: Tensor, starts: Tensor, num_tokens: Tensor, device_slots: DeviceSlots) -> Tensor:
        """Compute tokens; returns the logits after the last of each slot."""
        token_ids, layout = device_slots.layout(slots, num_tokens, starts)
        if self.computed is not None:
            self.computed[slots] = starts + num_tokens
        if layout.num_tokens == layout.num_seqs:
            return self.steps.logits(token_ids, layout)
        ends = layout.query_starts[1:].long() - 1
        return self.decoder.logits(self.decoder.hidden(token_ids, layout, self.caches, kept=ends))
