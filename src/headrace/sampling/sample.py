"""Filters and sampling: a fused kernel on a CPU in float32, other kernels on a GPU, the reference elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.sampling import reference
from headrace.sampling.feature import Batch, LogitsFeature
from headrace.sampling.temperature import Temperature


def sample(batch: Batch, filters: Iterable[tuple[LogitsFeature, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the sampled token of each row, [R] int64, and its flag, [R] uint8: 0, or steps.BROKEN (`Sampled.flags`).

    `filters` are those in use, each with the rows of the batch that use it.
    """
    if batch.logits.device.type == "cuda":
        has_filters = any(not isinstance(feature, Temperature) for feature, _ in filters)
        return sample_on_gpu(batch, has_filters=has_filters)
    if batch.logits.device.type != "cpu" or batch.logits.dtype != torch.float32:
        return reference.sample(batch, filters)
    from headrace.kernels.cpu import sample as kernel  # numba takes half a second to import

    columns = {name: batch.columns[name] for name in ("temperature", "min_p", "top_k", "top_p", "seed")}
    return kernel.sample(batch.logits, batch.slots, batch.lens, **columns)


def sample_on_gpu(batch: Batch, *, has_filters: bool) -> tuple[Tensor, Tensor]:
    """Samples with the kernels and random numbers of the decode graphs: a sequence samples the same token in both."""
    from headrace.kernels.gpu.sample import sample as launch_sample
    from headrace.kernels.gpu.threshold_types import Filters

    columns = batch.columns
    tokens = torch.empty_like(batch.slots)
    flags = torch.empty_like(batch.slots, dtype=torch.uint8)
    filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
    launch_sample(
        batch.logits,
        batch.slots,
        batch.lens,
        columns["temperature"],
        columns["seed"],
        tokens,
        flags,
        filters,
        lens_of_batch=True,
    )
    return tokens, flags
