"""Memory of the KV cache, and copies of its blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import LayerCache
from headrace.kernels.ops.dispatch import kernels_for

CPU_CACHE_DTYPES = (torch.float32, torch.float16, torch.float8_e4m3fn)  # beside activations in float32


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocates one layer's cache, [num_blocks, Hkv, block_size, D] twice; on a CPU memory is committed only as it
    is used. In FP8, keys have units for numbers up to 62, which the caller replaces by those of the layer."""
    kernels = kernels_for(device, torch.float32 if device.type == "cpu" and dtype in CPU_CACHE_DTYPES else dtype)
    cache: LayerCache = kernels.allocate_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
    return cache


def allocate_latent_cache(
    num_blocks: int, block_size: int, rank: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Allocates one layer's cache of multi-head latent attention: for each token its latent and the rotated part of its
    key, [num_blocks, 1, block_size, R + rotary_dim], which are also its value."""
    kernels = kernels_for(device, dtype)
    cache: LayerCache = kernels.allocate_latent_cache(num_blocks, block_size, rank, rotary_dim, dtype, device)
    return cache


def copy_blocks(caches: list[LayerCache], sources: Tensor, targets: Tensor) -> None:
    """Copies blocks sources[i] to targets[i] in every layer. No block may be both a source and a target."""
    reference.copy_blocks(caches, sources, targets)
