"""Whether and in which tiles decode attention reads a shared prefix once for several sequences."""

from __future__ import annotations

import torch

from headrace.kernels.gpu.shared_attention import shared_shape
from headrace.models.spec import ModelSpec

MAX_HEADS_SHARING = 16  # query heads of one kv head: at least four sequences fit in a tile


def can_share_prefixes(spec: ModelSpec, max_len: int) -> bool:
    """Whether decode can share prefixes: not with sliding windows, which end within a prefix, nor with so many query
    heads on a kv head that one sequence fills a tile, as with latents."""
    if spec.latent is not None:
        return False
    has_windows = any(spec.window_of(layer, max_len) is not None for layer in range(spec.num_layers))
    return not has_windows and spec.num_heads // spec.num_kv_heads <= MAX_HEADS_SHARING


def seqs_per_tile(spec: ModelSpec, kv_dtype: torch.dtype) -> int:
    """The number of sequences whose query heads of one kv head fill a tile."""
    return max(1, shared_shape(spec.head_dim, kv_dtype).rows // (spec.num_heads // spec.num_kv_heads))
