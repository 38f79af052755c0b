"""The draw, filters included: the fused kernel on a CPU, the plain twin elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.sampling import twin
from headrace.sampling.feature import Batch, LogitsFeature


def draw(batch: Batch, filters: Iterable[tuple[LogitsFeature, Tensor]]) -> tuple[Tensor, Tensor]:
    """The chosen token of each row, and whether its logits were fit to choose from; both [R].

    `filters` are those in use, each with the places in the batch of the rows that use it.
    """
    if batch.logits.device.type != "cpu" or batch.logits.dtype != torch.float32:
        return twin.draw(batch, filters)
    from headrace.kernels.cpu import draw as kernel  # numba takes half a second to import

    columns = {name: batch.columns[name] for name in ("temperature", "min_p", "top_k", "top_p", "seed")}
    return kernel.draw(batch.logits, batch.rows, batch.lens, **columns)
