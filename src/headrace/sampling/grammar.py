"""structured_outputs: only tokens that the answer's grammar allows next can be sampled.

The host computes which these are while the model runs, as one bit per token; see `engine/constraints.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.sampling.columns import sent
from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.steps import DraftsBySlot, IntArray, Masks
from headrace.types import SamplingParams, StructuredOutputs


@dataclass(frozen=True, slots=True)
class PlacedMasks:
    """The masks of the rows of a batch that are under a grammar."""

    rows: Tensor  # [Q] int64, rows of the batch
    bits: Tensor  # [Q, words] int32

    @classmethod
    def of(cls, masks: Masks, slots: IntArray, device: torch.device) -> PlacedMasks:
        """Finds the masks of these slots, in their order; waits until the masks are known. Masks of other slots are
        left out."""
        order = np.argsort(slots, kind="stable")
        found = np.minimum(np.searchsorted(slots, masks.slots, sorter=order), len(slots) - 1)
        rows = order[found]
        is_here = slots[rows] == masks.slots
        bits = masks.bits()
        if not is_here.all():
            rows, bits = rows[is_here], bits[is_here]
        return cls(sent(rows, device), sent(bits, device))

    @classmethod
    def of_drafts(cls, masks: Masks, slots: IntArray, drafts: DraftsBySlot, device: torch.device) -> PlacedMasks:
        """The same for a step that verifies drafts: each slot has one row, and one more for each of its drafts."""
        counts = np.array([1 + len(drafts[slot]) for slot in slots.tolist()])
        starts = dict(zip(slots.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True))
        rows = [starts[slot] + np.arange(1 + len(drafts[slot])) for slot in masks.slots.tolist()]
        return cls(sent(np.concatenate(rows), device), sent(masks.bits(drafts), device))


class Grammar:
    params = ("structured_outputs",)
    columns: Sequence[Column] = ()

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.structured_outputs is not None

    def needs_masks(self, params: SamplingParams) -> bool:
        """Tells whether each token is under a grammar. An answer of any form has masks only in its reasoning."""
        outputs = params.structured_outputs
        return isinstance(outputs, StructuredOutputs) and not outputs.is_any

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        return {}

    def apply(self, batch: Batch, masks: PlacedMasks) -> None:
        ops.apply_bitmask(batch.logits, masks.rows, masks.bits)
