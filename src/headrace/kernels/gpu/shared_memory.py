"""How much shared memory a program may use: tiles are chosen to fit."""

from __future__ import annotations

import functools

import torch
from triton.runtime import driver

_HOPPER_BYTES = 232_448  # for a tensor that is not on a GPU, as in Triton's interpreter


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOPPER_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def fitting_stages(num_stages: int, stage_bytes: int, device: torch.device) -> int:
    """Returns the stages of a loop whose loads take `stage_bytes` each: `num_stages`, or as many as fit. The tiles of
    all but one are in shared memory at once."""
    return max(1, min(num_stages, 1 + shared_memory_bytes(device) // stage_bytes))
