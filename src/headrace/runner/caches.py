"""Allocates what layers keep of sequences: KV blocks where they have attention, and the recurrent states of slots."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.kernels import ops
from headrace.models.spec import ModelSpec


def allocate_caches(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: torch.dtype,  # of the activations
    device: torch.device,
    kv_dtype: torch.dtype | None = None,  # None: that of the activations
) -> list[ops.LayerCache]:
    """One per layer."""

    def of_layer(layer: int) -> ops.LayerCache:
        layer_blocks = num_blocks if spec.has_attention(layer) else 0
        cache = ops.allocate_cache(
            layer_blocks, block_size, spec.num_kv_heads, spec.head_dim, kv_dtype or dtype, device
        )
        return replace(cache, state=allocate_state(spec, layer, num_slots=num_slots, dtype=dtype, device=device))

    return [of_layer(layer) for layer in range(spec.num_layers)]


def allocate_state(
    spec: ModelSpec, layer: int, *, num_slots: int, dtype: torch.dtype, device: torch.device
) -> ops.LayerState | None:
    recurrent = spec.recurrent
    if recurrent is None or not spec.has_state(layer):
        return None
    conv = torch.empty(num_slots, recurrent.kernel_size - 1, recurrent.conv_size, dtype=dtype, device=device)
    shape = recurrent.matrix_shape
    if shape is None:
        return ops.LayerState(conv)
    return ops.LayerState(conv, torch.empty(num_slots, *shape, dtype=torch.float32, device=device))
