"""What a step brought, from the device's tensors to the plan's arrays."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

from headrace.sampling import SampledLogprobs
from headrace.steps import StepLogprobs

T = TypeVar("T")


def on_its_way(found: T) -> T:
    """The same tensors in pinned memory, there once the step is done: reading them then waits for no later step."""
    return type(found)(*(_on_its_way(getattr(found, field.name)) for field in fields(found)))  # type: ignore[arg-type]


def _on_its_way(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def step_logprobs(asked: SampledLogprobs) -> StepLogprobs:
    return StepLogprobs(
        slots=asked.slots.cpu().numpy(),
        chosen=asked.chosen.float().cpu().numpy(),
        ranks=asked.ranks.cpu().numpy(),
        top_ids=asked.top_ids.cpu().numpy(),
        top_values=asked.top_values.float().cpu().numpy(),
    )
