"""structured_outputs: only tokens with which the answer keeps to its grammar can be drawn.

The host works out which these are while the model runs, as a bit for each token; see `engine/constraints.py`.
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
from headrace.steps import IntArray, Masks


@dataclass(frozen=True, slots=True)
class PlacedMasks:
    """The masks of those rows of a batch that are under a grammar."""

    places: Tensor  # [Q] int64, where they stand in the batch
    bits: Tensor  # [Q, words] int32

    @classmethod
    def of(cls, masks: Masks, slots: IntArray, device: torch.device) -> PlacedMasks:
        """For the rows that draw, in their order; waits until the masks are known. Rows that ended are left out."""
        order = np.argsort(slots, kind="stable")
        found = np.minimum(np.searchsorted(slots, masks.slots, sorter=order), len(slots) - 1)
        places = order[found]
        is_here = slots[places] == masks.slots
        bits = masks.bits()
        if not is_here.all():
            places, bits = places[is_here], bits[is_here]
        return cls(sent(places, device), sent(bits, device))


class Grammar:
    columns: Sequence[Column] = ()

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.structured_outputs is not None

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        return {}

    def apply(self, batch: Batch, masks: PlacedMasks) -> None:
        ops.apply_bitmask(batch.logits, masks.places, masks.bits)
