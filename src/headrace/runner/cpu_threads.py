"""Sets how many cores the arithmetic uses. The setting is per thread, so the device thread sets it for itself."""

from __future__ import annotations

import torch


def use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
