"""Reference of filters and sampling: sorts, in float64. It specifies the kernels, and runs where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.sampling.feature import Batch, LogitsFeature
from headrace.sampling.philox import uniform
from headrace.steps import BROKEN


def sample(batch: Batch, filters: Iterable[tuple[LogitsFeature, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns the sampled token of each row, [R] int64, and its flag, [R] uint8.

    The flag is steps.BROKEN where a logit is NaN or the largest is not finite, else 0. Greedy rows take the first of
    the largest logits. The others take the first token, in the order of ids, at which the sum of probabilities passes
    the row's random number.
    """
    is_valid = batch.logits.amax(dim=1).isfinite()  # amax of a row with a NaN is NaN
    logits = batch.logits.double().masked_fill(~is_valid[:, None], 0.0)
    is_greedy = batch.columns["temperature"][batch.slots] == 0.0
    best = logits.argmax(dim=1)
    for feature, rows in filters:
        feature.apply(dataclasses.replace(batch, logits=logits), rows)
    sampled = _sample(logits, uniform(batch.columns["seed"][batch.slots], batch.lens))
    flags = torch.where(is_valid, 0, BROKEN).to(torch.uint8)
    return torch.where(is_greedy, best, sampled).masked_fill(~is_valid, 0), flags


def _sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    sums = torch.exp(logits - logits.amax(dim=1, keepdim=True)).cumsum(dim=1)  # [R, V]
    totals = sums[:, -1:].contiguous()
    sampled = torch.searchsorted(sums, uniforms[:, None] * totals, right=True)
    last = torch.searchsorted(sums, totals)  # the last token with any probability
    return torch.minimum(sampled, last)[:, 0]
