"""Memory of the KV cache, and copies of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.layout import LayerCache
from headrace.kernels.reference.e3m4 import plain_key_units
from headrace.kernels.reference.fp8 import FP8


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """See `ops.allocate_cache`."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(
        keys=torch.empty(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device),
        values=torch.empty(shape, dtype=dtype, device=device),
        key_units=plain_key_units(num_kv_heads, device) if dtype == FP8 else None,
    )


def allocate_latent_cache(
    num_blocks: int, block_size: int, rank: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """See `ops.allocate_latent_cache`."""
    keys = torch.empty((num_blocks, 1, block_size, rank + rotary_dim), dtype=dtype, device=device)
    return LayerCache.of_latents(keys, rank)


def copy_blocks(caches: list[LayerCache], sources: Tensor, targets: Tensor) -> None:
    """Copies blocks sources[i] to targets[i] in every layer. No block may be both a source and a target."""
    for cache in caches:
        for side in (cache.keys, cache.values):  # of latents both are the same memory
            plain = side.view(torch.uint8) if side.dtype == FP8 else side  # every device can index bytes
            plain[targets] = plain[sources]


def copy_blocks_to_rows(sides: Sequence[Tensor], blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies blocks[i] of all sides (`LayerCache.raw_sides`) to rows[places[i]], [num_places, words of all sides]."""
    start = 0
    for side in sides:
        rows[places, start : start + side.shape[1]] = side[blocks]
        start += side.shape[1]


def copy_rows_to_blocks(sides: Sequence[Tensor], blocks: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copies rows[places[i]] to blocks[i] of all sides."""
    start = 0
    for side in sides:
        side[blocks] = rows[places, start : start + side.shape[1]]
        start += side.shape[1]
