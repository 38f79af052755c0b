"""Rotary embeddings and attention: over the paged cache, over a cache of latents, and without a cache."""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.layout import LayerCache, PackedLayout, StepLayout
from headrace.kernels.ops.dispatch import kernels_for


def rope_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,  # [D], RMS norm of each head before the rotation
    k_norm: Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> Tensor:  # [T, Hq, D]
    """Rotates queries and keys, and stores keys and values where `slot_mapping` says. May use `qkv` as scratch."""
    kernels = kernels_for(qkv.device, qkv.dtype)
    out: Tensor = kernels.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads, q_norm, k_norm, eps)
    return out


def paged_attention(
    q: Tensor,  # [T, Hq, D]
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
    """Attends from position p to positions max(0, p - window + 1)..p of the same sequence, read from the cache; or to p
    // window * window..p, if the window does not slide. A sink is one more score of its head, without a value: it only
    takes its share of the softmax. A slope lowers the scores of its head in proportion to the distance (ALiBi).

    `q` must come from `rope_and_store`: on a GPU the step's own keys and values are beside it in memory.
    """
    out: Tensor = kernels_for(q.device, q.dtype).paged_attention(
        q, cache, layout, scale, window, softcap, slides=slides, sinks=sinks, slopes=slopes
    )
    return out


def takes_few_decodes(qkv: Tensor, layout: StepLayout, head_dim: int) -> bool:
    """Whether `rope_and_attend` takes a step."""
    kernels = kernels_for(qkv.device, qkv.dtype)
    return layout.has_few_decodes and bool(kernels.takes_few_decodes(layout, head_dim))


def rope_and_attend(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, D] float32
    cache: LayerCache,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    eps: float,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    slides: bool = True,
    sinks: Tensor | None = None,  # [Hq] float32
    slopes: Tensor | None = None,  # [Hq] float32
) -> Tensor:  # [T, Hq * D]
    """`rope_and_store` and `paged_attention` in one kernel, for few decodes on a GPU (`takes_few_decodes`)."""
    out: Tensor = kernels_for(qkv.device, qkv.dtype).rope_and_attend(
        qkv, layout, cos_sin, cache, num_heads, num_kv_heads, q_norm, k_norm, eps, scale, window, softcap,
        slides=slides, sinks=sinks, slopes=slopes,
    )  # fmt: skip
    return out


def rope_and_store_latent(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    latents: Tensor,  # [T, R]
    rotary_keys: Tensor,  # [T, rotary_dim]
    layout: StepLayout,
    cos_sin: Tensor,  # [max_len, rotary_dim] float32, cosines in the first half of a row, sines in the second
    cache: LayerCache,
) -> None:
    """Rotates the last dimensions of the queries in place, and stores latents and rotated keys as one head."""
    kernels_for(q.device, q.dtype).rope_and_store_latent(q, latents, rotary_keys, layout, cos_sin, cache)


def latent_attention(
    q: Tensor,  # [T, Hq, R + rotary_dim]
    cache: LayerCache,
    layout: StepLayout,
    scale: float,
) -> Tensor:  # [T, Hq, R]
    """Attends as `paged_attention` does, over a cache of latents: all query heads share its one head."""
    out: Tensor = kernels_for(q.device, q.dtype).latent_attention(q, cache, layout, scale)
    return out


def rotate(qkv: Tensor, positions: Tensor, cos_sin: Tensor, num_heads: int) -> None:  # [T, 3 * H * D], [T]
    """Rotates queries and keys in place, for an encoder, which has no cache to store them in."""
    kernels_for(qkv.device, qkv.dtype).rotate(qkv, positions, cos_sin, num_heads)


def bidirectional_attention(
    qkv: Tensor,  # [T, 3 * H * D]
    layout: PackedLayout,
    num_heads: int,
    scale: float,
    reach: int | None = None,
) -> Tensor:  # [T, H * D]
    """Attends from each token to all tokens of its text, or to those up to `reach` before and after it."""
    attend = kernels_for(qkv.device, qkv.dtype).bidirectional_attention
    out: Tensor = attend(qkv, layout, num_heads, scale, reach)
    return out
