"""Attention over the paged cache. A step lists decoding sequences first, then prefill continuations, then fresh
prefills.

Decoding and prefills have their own kernels; FlashAttention-3 computes prefills where it is available.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.gpu import flash
from headrace.kernels.gpu.decode_attention import decode_attention
from headrace.kernels.gpu.prefill_attention import prefill_attention
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.kernels.reference.e3m4 import plain_key_units
from headrace.kernels.reference.fp8 import FP8


def allocate_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Returns a zeroed cache: positions without a token yet are multiplied by weights of zero, so they must be
    finite."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(
        keys=torch.zeros(shape, dtype=torch.uint8 if dtype == FP8 else dtype, device=device),
        values=torch.zeros(shape, dtype=dtype, device=device),
        key_units=plain_key_units(num_kv_heads, device) if dtype == FP8 else None,
    )


def paged_attention(
    q: Tensor,  # [T, Hq, D], heads contiguous
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> Tensor:  # [T, Hq * D]
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if layout.num_decodes:
        decode_attention(q, cache, layout, out, scale, window, softcap, slides=slides, sinks=sinks, slopes=slopes)
    num_prefills = layout.num_seqs - layout.num_decodes
    is_plain = sinks is None and slopes is None  # FlashAttention-3 has neither
    uses_flash = is_plain and layout.num_fresh > 0 and flash.takes(q, window, layout.max_query_len)
    if uses_flash:
        flash.fresh_attention(q, cache.keys.shape[1], layout, out, scale, softcap)
        num_prefills -= layout.num_fresh
    gatherings = layout.gatherings if is_plain else ()
    if gatherings and flash.takes(q, window, max(gathering.longest for gathering in gatherings)):
        for gathering in gatherings:
            flash.gathered_attention(q, cache, layout, gathering, out, scale, softcap)
            num_prefills -= gathering.starts.shape[0] - 1
    if num_prefills:
        prefill_attention(
            q, cache, layout, out, scale, window, softcap,
            slides=slides, sinks=sinks, slopes=slopes, with_fresh=not uses_flash,
        )  # fmt: skip
    return out.flatten(1)
