"""Brings a step's results from the device's tensors to numpy arrays."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

from headrace.sampling import SampledLogprobs
from headrace.steps import StepLogprobs

T = TypeVar("T")


def to_pinned(tensors: T) -> T:
    """Start copying a dataclass of tensors, or None, to pinned memory. The copy is complete once the step is done, so
    reading it does not wait for later steps."""
    return type(tensors)(*(_to_pinned(getattr(tensors, field.name)) for field in fields(tensors)))  # type: ignore[arg-type]


def _to_pinned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def step_logprobs(asked: SampledLogprobs) -> StepLogprobs:
    return StepLogprobs(
        slots=asked.slots.cpu().numpy(),
        chosen=asked.chosen.float().cpu().numpy(),
        ranks=asked.ranks.cpu().numpy(),
        top_ids=asked.top_ids.cpu().numpy(),
        top_values=asked.top_values.float().cpu().numpy(),
        named_values=None if asked.named_values is None else asked.named_values.cpu().numpy(),
    )
