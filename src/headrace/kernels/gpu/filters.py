"""What min_p, top_k and top_p are told, and what they find."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """The settings of all rows; [num_rows] each."""

    min_p: Tensor  # float64; 0 is off
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float64; 1 is off


@dataclass(frozen=True, slots=True)
class Cuts:
    """What the rows of a batch keep; [R] each."""

    values: Tensor  # float32, -inf where nothing is cut off
    last_ids: Tensor  # int32, the last token that is kept of those whose logits are equal to the cut
