"""How much shared memory a program may use: tiles are chosen to fit."""

from __future__ import annotations

import functools

import torch

_HOPPER_BYTES = 232_448  # for a tensor that is not on a GPU, as in Triton's interpreter


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _HOPPER_BYTES
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
