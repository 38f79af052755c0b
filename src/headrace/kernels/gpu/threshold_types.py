"""Input and output of the search for min_p, top_k and top_p thresholds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """The settings of all slots; [num_slots] each."""

    min_p: Tensor  # float64; 0 is off
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float64; 1 is off


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Which tokens each row of a batch keeps; [R] each."""

    values: Tensor  # float32, the lowest logit that is kept; -inf keeps all
    last_ids: Tensor  # int32, the last token id that is kept among logits equal to the threshold
